"""What has been said, in forms that branches share: a tree forks its policy at every node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(eq=False)
class _Log:
    tokens: np.ndarray
    used: int


class History:
    """Tokens so far. Branches share one growing array; the first to append goes on in it, any
    other branch moves to a copy."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._length = len(tokens)
        self._log = _Log(np.empty(max(64, 2 * len(tokens)), np.int32), len(tokens))
        self._log.tokens[: len(tokens)] = tokens

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """int32 `[len(self)]`, a view not to be written to."""
        return self._log.tokens[: self._length]

    def append(self, token: int) -> None:
        log, length = self._log, self._length
        if log.used != length or length == len(log.tokens):
            grown = np.empty(max(64, 2 * length), np.int32)
            grown[:length] = log.tokens[:length]
            self._log = log = _Log(grown, length)
        log.tokens[length] = token
        log.used = self._length = length + 1

    def fork(self) -> History:
        branch = object.__new__(History)
        branch._log, branch._length = self._log, self._length
        return branch

    def ends_with(self, tokens: Sequence[int]) -> bool:
        count = len(tokens)
        return count <= self._length and self.tokens[self._length - count :].tolist() == list(
            tokens
        )


@dataclass(frozen=True, eq=False)
class Counts:
    """How often each token occurred: `tokens` int32 ascending, `numbers` float32. A value; `add`
    makes another, so branches share it for nothing."""

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
