"""Beam search (Graves, arXiv:1211.3711).

A fixed number of partial hypotheses is extended in parallel, and only the most likely ones are
kept. The length penalty (Wu et al., arXiv:1609.08144) has the form `sum / length ** penalty` that
most libraries use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.errors import InvalidRequestError
from anydecode.sampling.candidates import Distribution
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey


@dataclass(eq=False)
class _Beam:
    sequence: Sequence
    total: float


class BeamState(TypedDict):
    """Tokens and log-probability of the live beams; score and tokens of the finished ones."""

    live: list[tuple[list[int], float]]
    finished: list[tuple[float, list[int]]]


_STATE: StateKey[BeamState] = StateKey("beam", "state")


@register(
    Card(
        "beam",
        "search",
        paper="Sequence Transduction with Recurrent Neural Networks (arXiv:1211.3711)",
        exactness="lossy",
        summary="Keeps the most likely partial hypotheses and emits the best one at the end.",
        works_with=("constraints", "penalties", "guidance", "batches", "adapters"),
        deviations=("the text is emitted when the search ends, not while it runs",),
        remote={"width": Range(1, 16), "penalty": Range(-50, 50)},
    )
)
class Beam(Decoder):
    """Beam search over `width` hypotheses.

    The score of a hypothesis is `sum of log-probabilities / number of tokens ** penalty`. The
    request's penalties, bans and constraints change the log-probabilities; its temperature and
    truncations (top-k, top-p, ...) are ignored. With `width` 1 the output is that of greedy
    decoding.

    Args:
        width: How many hypotheses are kept.
        penalty: The exponent of the length, between -50 and 50.
        early: Stop as soon as `width` hypotheses have finished, even if a live one could still
            get a higher score.
    """

    requirements = Requirements(can_sample=False)

    def __init__(self, width: int = 4, penalty: float = 1.0, early: bool = False) -> None:
        if width < 1:
            raise InvalidRequestError(f"width must be at least 1, not {width}")
        if not -50 <= penalty <= 50:  # beyond, `length ** penalty` overflows or vanishes
            raise InvalidRequestError(f"penalty must be between -50 and 50, not {penalty}")
        self.width = width
        self.penalty = penalty
        self.early = early

    def prepare(self, sequence: Sequence) -> None:
        sampler = sequence.sampler
        sequence.sampler = Sampler(
            1.0, pre_temperature=sampler.pre_temperature, combiner=sampler.combiner
        )

    def decode(self, sequence: Sequence) -> Decoding:
        limit = sequence.remaining
        state = sequence.state.setdefault(_STATE, BeamState(live=[([], 0.0)], finished=[]))
        finished = state["finished"]
        beams = [self._beam_of(sequence, tokens, total) for tokens, total in state["live"]]
        depth = len(state["live"][0][0])
        num_emitted = len(sequence.tokens)
        while beams and depth < limit and not self._is_finished(beams, finished, depth, limit):
            results = yield [beam.sequence.score() for beam in beams]
            expansions = self._expand(beams, [scores.distribution(-1) for scores in results])
            depth += 1
            beams = self._select(beams, expansions, finished, depth)
            state["live"] = [(b.sequence.tokens[num_emitted:], b.total) for b in beams]
        if depth >= limit:  # else the live hypotheses are not whole texts
            finished += [
                (self._hypothesis_score(beam.total, depth), beam.sequence.tokens[num_emitted:])
                for beam in beams
            ]
        best = max(finished, key=lambda hypothesis: hypothesis[0])[1]
        for beam in beams:
            beam.sequence.release()
        sequence.emit(best)

    @staticmethod
    def _beam_of(sequence: Sequence, tokens: list[int], total: float) -> _Beam:
        branch = sequence.fork()
        for token in tokens:
            branch.append(token)
        return _Beam(branch, total)

    def _hypothesis_score(self, total: float, length: int) -> float:
        return total / math.pow(max(1, length), self.penalty)

    def _is_finished(
        self, beams: list[_Beam], finished: list[tuple[float, list[int]]], depth: int, limit: int
    ) -> bool:
        """Whether no live beam can still score higher than the worst of `width` finished ones."""
        if len(finished) < self.width:
            return False
        if self.early:
            return True
        final_length = limit if self.penalty > 0 else max(1, depth)
        best = max(self._hypothesis_score(beam.total, final_length) for beam in beams)
        return best <= min(score for score, _ in finished)

    def _expand(
        self, beams: list[_Beam], distributions: list[Distribution]
    ) -> list[tuple[float, int, int]]:
        """The best `2 * width` continuations as (total log-probability, beam index, token)."""
        expansions: list[tuple[float, int, int]] = []
        for number, (beam, distribution) in enumerate(zip(beams, distributions, strict=True)):
            with np.errstate(divide="ignore"):
                logprobs = np.log(distribution.probabilities())
            num_kept = min(2 * self.width, len(logprobs))
            index = np.argpartition(-logprobs, num_kept - 1)[:num_kept]
            ids = index if distribution.tokens is None else distribution.tokens[index]
            expansions += [
                (beam.total + float(logprob), number, int(token))
                for logprob, token in zip(logprobs[index], ids, strict=True)
                if np.isfinite(logprob)
            ]
        return sorted(expansions, key=lambda item: (-item[0], item[1], item[2]))[: 2 * self.width]

    def _select(
        self,
        beams: list[_Beam],
        expansions: list[tuple[float, int, int]],
        finished: list[tuple[float, list[int]]],
        depth: int,
    ) -> list[_Beam]:
        """The `width` beams that go on; hypotheses that end move to `finished`."""
        chosen: list[tuple[float, int, int]] = []
        for rank, (total, number, token) in enumerate(expansions):
            branch = beams[number].sequence
            if branch.stops_at(token):
                if rank < self.width:
                    tokens = branch.tokens[len(branch.tokens) - depth + 1 :] if depth > 1 else []
                    finished.append((self._hypothesis_score(total, depth), [*tokens, token]))
                    finished.sort(key=lambda hypothesis: -hypothesis[0])
                    del finished[self.width :]
            elif len(chosen) < self.width:
                chosen.append((total, number, token))
        selected: list[_Beam] = []
        parents = [number for _, number, _ in chosen]
        for i, (total, number, token) in enumerate(chosen):
            parent = beams[number].sequence
            branch = parent.branch() if number in parents[i + 1 :] else parent
            selected.append(_Beam(branch, total))
            branch.append(token)
        for number, beam in enumerate(beams):
            if number not in parents:
                beam.sequence.release()
        return selected
