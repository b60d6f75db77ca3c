"""Words as token ids, for `banned_words`."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.banned_words import BannedWordTable


def word_tokens(tokenizer: Tokenizer, words: Seq[str | Seq[int]]) -> list[Seq[int]]:
    """Words as token ids; a text gives two entries, without and with a leading space.

    Raises:
        InvalidRequestError: A text cannot be encoded.
    """
    encoded: list[Seq[int]] = []
    for word in words:
        if isinstance(word, str):
            encoded += [tokenizer.encode(form, special=False) for form in (word, " " + word)]
        else:
            encoded.append(word)
    return encoded


def word_table(tokenizer: Tokenizer, words: Seq[str | Seq[int]]) -> BannedWordTable:
    """Words, which are texts or valid token ids, as a table.

    Raises:
        InvalidRequestError: A text cannot be encoded, or a word is empty.
    """
    return BannedWordTable(word_tokens(tokenizer, words))
