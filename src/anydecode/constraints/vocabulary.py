"""The bytes of a tokenizer's tokens, and look-up of tokens by their bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache
from weakref import WeakKeyDictionary

from anydecode.models.tokenizer import Tokenizer

#: Texts of which the tokens that complete them are kept.
NUM_COMPLETED = 64


class Vocabulary:
    """The bytes of the tokens of one tokenizer.

    `token_bytes[token]` is empty for special tokens and for ids from the tokenizer's vocabulary
    size up to `size`, the width of the logits.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        num_tokens = min(size, tokenizer.vocab_size)
        self.size = size
        self.token_bytes = [tokenizer.token_bytes(token) for token in range(num_tokens)] + [b""] * (
            size - num_tokens
        )
        self._order = sorted(range(num_tokens), key=lambda token: (self.token_bytes[token], token))
        self._sorted = [self.token_bytes[token] for token in self._order]
        self._longest = max(map(len, self._sorted), default=0)
        #: `_completing`, of the last few texts.
        self.tokens_completing = lru_cache(NUM_COMPLETED)(self._completing)

    def tokens_with_prefix(self, prefix: bytes) -> Iterator[int]:
        """Tokens whose bytes start with `prefix` (not empty), in the order of their bytes."""
        index = bisect_left(self._sorted, prefix)
        while index < len(self._sorted) and self._sorted[index].startswith(prefix):
            yield self._order[index]
            index += 1

    def has_longer(self, prefix: bytes) -> bool:
        """Whether a token longer than `prefix` starts with it."""
        index = bisect_right(self._sorted, prefix)
        return index < len(self._sorted) and self._sorted[index].startswith(prefix)

    def tokens_equal_to(self, data: bytes) -> Iterator[int]:
        """Tokens whose bytes equal `data` (not empty)."""
        for token in self.tokens_with_prefix(data):
            if len(self.token_bytes[token]) > len(data):
                return
            yield token

    def _completing(self, text: bytes) -> frozenset[int]:
        """Tokens with which a text may come to contain `text` (not empty): those that contain it,
        and those that begin with an end of it."""
        found = {token for token, data in enumerate(self.token_bytes) if text in data}
        for start in range(max(1, len(text) - self._longest), len(text)):
            found.update(self.tokens_with_prefix(text[start:]))
        return frozenset(found)

    def tokenize_greedily(self, text: bytes) -> list[int] | None:
        """Tokenizes `text`, taking the longest matching token each time. None if no token matches
        the remaining text."""
        tokens: list[int] = []
        while text:
            match = next(
                (
                    token
                    for length in range(len(text), 0, -1)
                    for token in self.tokens_equal_to(text[:length])
                ),
                None,
            )
            if match is None:
                return None
            tokens.append(match)
            text = text[len(self.token_bytes[match]) :]
        return tokens


_vocabularies: WeakKeyDictionary[Tokenizer, dict[int, Vocabulary]] = WeakKeyDictionary()


def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The vocabulary of `tokenizer` for logits of width `size`, cached."""
    sizes = _vocabularies.setdefault(tokenizer, {})
    if size not in sizes:
        sizes[size] = Vocabulary(tokenizer, size)
    return sizes[size]
