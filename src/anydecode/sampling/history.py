"""Token history and token counts that branches can share cheaply: a draft tree forks the sampler at
every node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(eq=False)
class _SharedTokens:
    tokens: np.ndarray
    used: int


class History:
    """The tokens so far. Branches share one growing array: the first to append continues in it, the
    others move to a copy."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._length = len(tokens)
        self._shared = _SharedTokens(np.empty(max(64, 2 * len(tokens)), np.int32), len(tokens))
        self._shared.tokens[: len(tokens)] = tokens

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """int32 `[len(self)]`, a read-only view."""
        return self._shared.tokens[: self._length]

    def append(self, token: int) -> None:
        shared, length = self._shared, self._length
        if shared.used != length or length == len(shared.tokens):
            grown = np.empty(max(64, 2 * length), np.int32)
            grown[:length] = shared.tokens[:length]
            self._shared = shared = _SharedTokens(grown, length)
        shared.tokens[length] = token
        shared.used = self._length = length + 1

    def fork(self) -> History:
        branch = object.__new__(History)
        branch._shared, branch._length = self._shared, self._length
        return branch

    def ends_with(self, tokens: Sequence[int]) -> bool:
        count = len(tokens)
        return count <= self._length and self.tokens[self._length - count :].tolist() == list(
            tokens
        )


@dataclass(frozen=True, eq=False)
class Counts:
    """Immutable token counts; `add` returns a new object, so branches can share one.

    Args:
        tokens: int32 ids, ascending.
        numbers: float32, the count of each.
    """

    tokens: np.ndarray
    numbers: np.ndarray

    @staticmethod
    def of(tokens: Sequence[int]) -> Counts:
        ids, numbers = np.unique(np.asarray(tokens, np.int32), return_counts=True)
        return Counts(ids, numbers.astype(np.float32))

    def add(self, token: int) -> Counts:
        position = int(np.searchsorted(self.tokens, token))
        if position < len(self.tokens) and self.tokens[position] == token:
            numbers = self.numbers.copy()
            numbers[position] += 1
            return Counts(self.tokens, numbers)
        before, after = slice(position), slice(position, None)
        one = np.ones(1, np.float32)
        return Counts(
            np.concatenate([self.tokens[before], np.array([token], np.int32), self.tokens[after]]),
            np.concatenate([self.numbers[before], one, self.numbers[after]]),
        )
