"""Penalties on tokens that have occurred: repetition, presence and frequency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anydecode.sampling.candidates import Candidates
from anydecode.sampling.history import Counts
from anydecode.sampling.processor import LogitsProcessor


class RepetitionPenalty(LogitsProcessor):
    """Logits of tokens in the prompt or the output are divided by `penalty` where positive and
    multiplied by it where negative (Keskar et al., "CTRL", 2019, arXiv 1909.05858)."""

    is_stateful = True

    def __init__(self, penalty: float, prompt: Sequence[int] = ()) -> None:
        self.penalty = np.float32(penalty)
        self._counts = Counts.of(prompt)

    def apply(self, candidates: Candidates) -> Candidates:
        positions, _ = candidates.positions(self._counts.tokens)
        if len(positions):
            scores = candidates.writable()
            logits = scores[positions]
            scores[positions] = np.where(logits > 0, logits / self.penalty, logits * self.penalty)
        return candidates

    def advance(self, token: int) -> None:
        self._counts = self._counts.add(token)

    def fork(self) -> RepetitionPenalty:
        branch = object.__new__(RepetitionPenalty)
        branch.penalty, branch._counts = self.penalty, self._counts
        return branch


_NO_COUNTS = Counts.of(())


@dataclass(eq=False)
class CountPenalty(LogitsProcessor):
    """logit -= presence + frequency * count for tokens in the output, as in OpenAI's API. The
    prompt does not count."""

    presence: float = 0.0
    frequency: float = 0.0
    counts: Counts = _NO_COUNTS

    is_stateful = True

    def apply(self, candidates: Candidates) -> Candidates:
        positions, found = candidates.positions(self.counts.tokens)
        if len(positions):
            numbers = self.counts.numbers[found]
            scores = candidates.writable()
            scores[positions] -= np.float32(self.presence) + np.float32(self.frequency) * numbers
        return candidates

    def advance(self, token: int) -> None:
        self.counts = self.counts.add(token)

    def fork(self) -> CountPenalty:
        return CountPenalty(self.presence, self.frequency, self.counts)
