"""One of several draft models for each request: the one that knows its topic best.

Liu et al., "Online Speculative Decoding", arXiv:2310.07177, route requests by topic to drafters
that each learn from their own; here a drafter's predictions of the prompt tell whether it knows the
topic.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np

from anydecode.decoders.framework.draft_candidates import fit_vocab
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

#: The number of a text's last tokens that draft models are compared on.
NUM_COMPARED = 64
_RUNNER: StateKey[str] = StateKey("routed drafters", "runner")


class RoutedDrafter(Drafter):
    """Drafts for a request with the draft model that predicts the last `NUM_COMPARED` tokens of its
    prompt best, by their mean log-probability; among equals with the first one. All read the prompt
    once.

    Args:
        drafter: Drafts with one draft model; what it learns is kept apart for each.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.requirements = replace(drafter.requirements, runners=(), every_draft=True)
        self.by_runner: dict[str, Drafter] = {}

    def prepare(self, sequence: Sequence) -> None:
        if (count := len(sequence.draft_runners)) < 2:
            raise InvalidRequestError(
                f"route=true chooses among draft models, and there are {count}; give several"
                " (draft=[a, b]) or leave it out"
            )
        for runner in sequence.draft_runners:
            self.of(runner).prepare(sequence)

    def of(self, runner: str) -> Drafter:
        """The drafter with the draft model of `runner`."""
        if runner not in self.by_runner:
            self.by_runner[runner] = self.drafter.on(runner)
        return self.by_runner[runner]

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    def clear(self) -> None:
        for part in self.by_runner.values():
            part.clear()

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.by_runner.values())


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, drafter: RoutedDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self.chosen: DraftSession | None = None

    def propose(self, size: int) -> Proposal:
        if self.chosen is None:
            runner = self.sequence.state.get(_RUNNER)
            if runner is None:
                runner = yield from self._best_runner()
                self.sequence.state[_RUNNER] = runner
            self.chosen = self.drafter.of(runner).open(self.sequence)
        return (yield from self.chosen.propose(size))

    def _best_runner(self) -> Generator[DecoderAction, Any, str]:
        runners, losses = self.sequence.draft_runners, list[float]()
        for runner in runners:
            losses.append((yield from self._loss(runner)))
        return runners[int(np.argmin(losses))]

    def _loss(self, runner: str) -> Generator[DecoderAction, Any, float]:
        """The mean negative log-probability of the last tokens, in nats; 0 if there is one only."""
        sequence, tokens = self.sequence, self.sequence.all_tokens
        num_rows = min(NUM_COMPARED, len(tokens) - 1)
        if num_rows < 1:
            return 0.0
        sequence.align(runner)
        kv_cache, first = sequence.kv_cache(runner), len(tokens) - 1 - num_rows
        kv_cache.truncate(min(kv_cache.length, first))
        scores = yield sequence.score(tokens[kv_cache.length : -1], runner=runner, rows=num_rows)
        total = 0.0
        for number, token in enumerate(tokens[first + 1 :]):
            row = fit_vocab(sequence, scores.row(number)).astype(np.float64)
            top = row.max()
            total += float(top + np.log(np.exp(row - top).sum()) - row[token])
        return total / num_rows

    def observe(self, round: SpeculationRound) -> None:
        if self.chosen is not None:
            self.chosen.observe(round)

    def end(self) -> None:
        if self.chosen is not None:
            self.chosen.end()
