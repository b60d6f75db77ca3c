"""An n-gram index of a growing token sequence: finds an earlier occurrence of the last tokens.

It costs well below a microsecond per token, and nothing before the first search, so it can be kept
even when nothing is drafted from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from operator import itemgetter
from typing import Any

import numpy as np

#: Separates texts in an index of several; no token has this id.
SEPARATOR = -1
#: Memory of a token and of one n-gram that ends with it, in bytes.
_BYTES_PER_NGRAM = 100


class NgramIndex:
    """A growing token sequence, and where each of its n-grams ended last.

    An n-gram is indexed once a token follows it; those of `extend`, at the next search.

    Args:
        sizes: The n-gram sizes.
        keep_first: Keep where each n-gram ended first, not last.
    """

    def __init__(self, sizes: Iterable[int], *, keep_first: bool = False) -> None:
        self.tokens: list[int] = []
        self._array, self._num_copied = np.empty(0, np.int32), 0
        self._keep_first = keep_first
        self._num_indexed = 0  # tokens before which all n-grams are in the tables
        # By size: the function that returns the n-gram at the end of a text, and the ends.
        self._tables: list[tuple[int, itemgetter[Any], dict[Any, int]]] = [
            (size, itemgetter(*range(-size, 0)), {}) for size in sorted(sizes)
        ]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """The estimated memory, in bytes."""
        return _BYTES_PER_NGRAM * len(self._tables) * len(self.tokens)

    def array(self, room: int = 0) -> np.ndarray:
        """The tokens as int32, and at least `room` unused numbers behind them. The same memory
        until it is too small."""
        end, first = len(self.tokens), self._num_copied
        if end + room > len(self._array):
            self._array = np.empty(2 * (end + room), np.int32)
            first = 0
        self._array[first:end] = self.tokens[first:]
        self._num_copied = end
        return self._array

    def append(self, token: int) -> None:
        """Append one token."""
        tokens = self.tokens
        end = len(tokens)
        if self._num_indexed < end:
            self._index()
        self._num_indexed = end + 1
        try:
            if self._keep_first:
                for _, last_ngram, ends in self._tables:
                    ends.setdefault(last_ngram(tokens), end)
            else:
                for _, last_ngram, ends in self._tables:
                    ends[last_ngram(tokens)] = end
        except IndexError:  # there are fewer tokens than an n-gram has
            pass
        tokens.append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens`."""
        self.tokens.extend(tokens)

    def _index(self) -> None:
        """Index the n-grams before the tokens of `extend`."""
        text, start = self.tokens, self._num_indexed
        self._num_indexed = len(text)
        for size, _, ends in self._tables:
            first = max(start, size)
            if first >= len(text):
                break  # there are fewer tokens than an n-gram has
            columns = [text[first - size + i : len(text) - size + i] for i in range(size)]
            ngrams: Iterable[Any] = zip(*columns, strict=True) if size > 1 else columns[0]
            pairs = zip(ngrams, range(first, len(text)), strict=True)
            if self._keep_first:
                for ngram, end in pairs:
                    ends.setdefault(ngram, end)
            else:
                ends.update(pairs)

    def find(self, text: Seq[int]) -> tuple[int, int]:
        """Find the longest n-gram that ends `text`.

        Returns:
            The position after its last (or first) occurrence, and its size; (0, 0) if none of the
                n-grams occurs.
        """
        end = length = 0
        if self._num_indexed < len(self.tokens):
            self._index()
        try:
            for size, last_ngram, ends in self._tables:
                found = ends.get(last_ngram(text))
                if found is None:
                    break
                end, length = found, size
        except IndexError:  # the text has fewer tokens than the next n-gram
            pass
        return end, length
