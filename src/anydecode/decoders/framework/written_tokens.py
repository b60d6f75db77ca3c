"""Whether a tokenizer would write given tokens for their text."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from anydecode.models.tokenizer import Tokenizer

#: Number of tokens before the tested ones that are tokenized together with them.
_NUM_CONTEXT_TOKENS = 4


def is_written(tokenizer: Tokenizer, before: Seq[int], tokens: list[int]) -> bool:
    """Whether the tokenizer produces `tokens` for their text after `before`. True if the tokens end
    inside a UTF-8 character, so that there is no text to tokenize."""
    context = [*before[-_NUM_CONTEXT_TOKENS:], *tokens]
    try:
        text = b"".join(map(tokenizer.token_bytes, context)).decode()
    except UnicodeDecodeError:
        return True
    return tokenizer.encode(text, special=False)[-len(tokens) :] == tokens
