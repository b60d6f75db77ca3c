"""Bias on chosen tokens, and tokens that must not come: bans, minimum length, repeated n-grams."""

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
        candidates.masked = True
    return candidates


class LogitBias(LogitsProcessor):
    """Adds `bias[token]` to logits; -inf forbids a token."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        ids = sorted(bias)
        self._ids = np.array(ids, np.int32)
        self._values = np.array([bias[token] for token in ids], np.float32)
        self._forbids = bool((self._values == -np.inf).any())

    def apply(self, candidates: Candidates) -> Candidates:
        positions, found = candidates.positions(self._ids)
        candidates.writable()[positions] += self._values[found]
        candidates.masked |= self._forbids
        return candidates


class BannedWords(LogitsProcessor):
    """Token sequences that must not appear in the output: the last token of each is forbidden
    where the others have just been said. The prompt's last tokens count as said."""

    stateful = True

    def __init__(self, words: Iterable[Sequence[int]], prompt: Sequence[int] = ()) -> None:
        words = [tuple(word) for word in words]
        self._single = np.unique(np.array([word[0] for word in words if len(word) == 1], np.int32))
        self._longer = tuple(word for word in words if len(word) > 1)
        reach = max((len(word) - 1 for word in self._longer), default=0)
        self._history = History(prompt[len(prompt) - min(reach, len(prompt)) :])

    def apply(self, candidates: Candidates) -> Candidates:
        last = [word[-1] for word in self._longer if self._history.ends_with(word[:-1])]
        ids = np.union1d(self._single, np.array(last, np.int32)) if last else self._single
        return forbid(candidates, ids)

    def advance(self, token: int) -> None:
        self._history.append(token)

    def fork(self) -> BannedWords:
        branch = object.__new__(BannedWords)
        branch._single, branch._longer = self._single, self._longer
        branch._history = self._history.fork()
        return branch


class MinimumLength(LogitsProcessor):
    """Forbids `ids` (end-of-text and stop tokens) until `length` tokens have been said."""

    stateful = True

    def __init__(self, length: int, ids: Iterable[int], said: int = 0) -> None:
        self.length = length
        self._ids = np.unique(np.array(list(ids), np.int32))
        self._said = said

    def apply(self, candidates: Candidates) -> Candidates:
        return forbid(candidates, self._ids) if self._said < self.length else candidates

    def advance(self, token: int) -> None:
        self._said += 1

    def fork(self) -> MinimumLength:
        branch = object.__new__(MinimumLength)
        branch.length, branch._ids, branch._said = self.length, self._ids, self._said
        return branch


class NoRepeatNgram(LogitsProcessor):
    """Forbids every token that would complete an n-gram that already occurred in prompt or output
    (Paulus et al., 2017, arXiv 1705.04304)."""

    stateful = True

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
            wanted = tokens[len(tokens) - self.size + 1 + offset]
            matches &= tokens[offset : offset + starts] == wanted
        return forbid(candidates, np.unique(tokens[self.size - 1 :][matches]))

    def advance(self, token: int) -> None:
        self._history.append(token)

    def fork(self) -> NoRepeatNgram:
        branch = object.__new__(NoRepeatNgram)
        branch.size, branch._history = self.size, self._history.fork()
        return branch
