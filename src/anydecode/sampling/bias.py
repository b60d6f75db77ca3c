"""Logit bias, banned tokens, minimum length, and no-repeat n-grams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from anydecode.sampling.candidates import Candidates
from anydecode.sampling.history import History
from anydecode.sampling.processor import LogitsProcessor


def forbid(candidates: Candidates, ids: np.ndarray) -> Candidates:
    """Set the scores of `ids` (no duplicates) to -inf."""
    positions, _ = candidates.positions(ids)
    if len(positions):
        candidates.writable()[positions] = -np.inf
    return candidates


class LogitBias(LogitsProcessor):
    """Adds `bias[token]` to logits; -inf forbids a token."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        ids = sorted(bias)
        self._ids = np.array(ids, np.int32)
        self._values = np.array([bias[token] for token in ids], np.float32)

    def apply(self, candidates: Candidates) -> Candidates:
        positions, found = candidates.positions(self._ids)
        candidates.writable()[positions] += self._values[found]
        return candidates


class FirstTokenBan(LogitsProcessor):
    """Forbids `ids` as the next token, and nothing after it."""

    is_stateful = True

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = np.unique(np.array(list(ids), np.int32))

    def apply(self, candidates: Candidates) -> Candidates:
        return forbid(candidates, self._ids)

    def advance(self, token: int) -> None:
        self._ids = self._ids[:0]

    def fork(self) -> FirstTokenBan:
        return FirstTokenBan(self._ids)


class MinimumLength(LogitsProcessor):
    """Forbids `ids` (end-of-text and stop tokens) until `length` tokens have been generated."""

    is_stateful = True

    def __init__(self, length: int, ids: Iterable[int], num_generated: int = 0) -> None:
        self.length = length
        self._ids = np.unique(np.array(list(ids), np.int32))
        self._num_generated = num_generated

    def apply(self, candidates: Candidates) -> Candidates:
        return forbid(candidates, self._ids) if self._num_generated < self.length else candidates

    def advance(self, token: int) -> None:
        self._num_generated += 1

    def fork(self) -> MinimumLength:
        branch = object.__new__(MinimumLength)
        branch.length, branch._ids = self.length, self._ids
        branch._num_generated = self._num_generated
        return branch


class NoRepeatNgram(LogitsProcessor):
    """Forbids every token that would complete an n-gram that has already occurred in prompt or
    output (Paulus et al., 2017, arXiv 1705.04304)."""

    is_stateful = True

    def __init__(self, size: int, prompt: Sequence[int] = ()) -> None:
        self.size = size
        self._history = History(prompt)

    def apply(self, candidates: Candidates) -> Candidates:
        tokens = self._history.tokens
        starts = len(tokens) - self.size + 1
        if starts < 1:
            return candidates
        matches = np.ones(starts, bool)
        for offset in range(self.size - 1):
            suffix_token = tokens[len(tokens) - self.size + 1 + offset]
            matches &= tokens[offset : offset + starts] == suffix_token
        return forbid(candidates, np.unique(tokens[self.size - 1 :][matches]))

    def advance(self, token: int) -> None:
        self._history.append(token)

    def fork(self) -> NoRepeatNgram:
        branch = object.__new__(NoRepeatNgram)
        branch.size, branch._history = self.size, self._history.fork()
        return branch
