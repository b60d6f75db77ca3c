"""Beam search (Graves, arXiv:1211.3711).

A fixed number of partial hypotheses is extended in parallel, and only the most likely ones are
kept. The length penalty (Wu et al., arXiv:1609.08144) has the form `sum / length ** penalty` that
most libraries use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.sampling.candidates import Distribution, exponentials, largest
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.ranked import RANKED, RankedText
from anydecode.scoring.score import Decoding, Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

#: Weights relative to the most probable token's that are selected from first.
_NOT_TINY = 1e-6


@dataclass(eq=False)
class _Beam:
    sequence: Sequence
    total: float
    logprobs: list[Any]


class BeamState(TypedDict):
    """Tokens, log-probability and requested log-probabilities of the live beams; the finished
    texts, best first."""

    live: list[tuple[list[int], float, list[Any]]]
    finished: list[RankedText]


_STATE: StateKey[BeamState] = StateKey("beam", "state")


@register(
    Card(
        "beam",
        "search",
        paper="Sequence Transduction with Recurrent Neural Networks (arXiv:1211.3711)",
        exactness="lossy",
        summary="Keeps the most likely partial hypotheses and emits the best one at the end.",
        works_with=("constraints", "penalties", "guidance", "logprobs", "batches", "adapters"),
        deviations=("the text is emitted when the search ends, not while it runs",),
        remote={"width": Range(1, 16), "penalty": Range(-50, 50)},
    )
)
class Beam(Decoder):
    """Beam search over `width` hypotheses.

    The score of a hypothesis is `sum of log-probabilities / number of tokens ** penalty`. The
    request's penalties, bans and constraints change the log-probabilities; its temperature and
    truncations (top-k, top-p, ...) are ignored. With `width` 1 the output is that of greedy
    decoding. A request with `n` above 1 receives the `n` best texts of one search, best first.

    Args:
        width: How many hypotheses are kept, and the largest `n`.
        penalty: The exponent of the length, between -50 and 50.
        early: Stop as soon as `width` hypotheses have finished, even if a live one could still
            get a higher score.
    """

    def __init__(self, width: int = 4, penalty: float = 1.0, early: bool = False) -> None:
        if width < 1:
            raise InvalidRequestError(f"width must be at least 1, not {width}")
        if not -50 <= penalty <= 50:  # beyond, `length ** penalty` overflows or vanishes
            raise InvalidRequestError(f"penalty must be between -50 and 50, not {penalty}")
        self.width = width
        self.penalty = penalty
        self.early = early
        self.requirements = Requirements(can_sample=False, max_texts=width)

    def prepare(self, sequence: Sequence) -> None:
        sampler = sequence.sampler
        sequence.sampler = Sampler(
            1.0, pre_temperature=sampler.pre_temperature, combiner=sampler.combiner
        )

    def decode(self, sequence: Sequence) -> Decoding:
        limit = sequence.remaining
        state = sequence.state.setdefault(_STATE, BeamState(live=[([], 0.0, [])], finished=[]))
        finished = state["finished"]
        beams = [self._beam_of(sequence, *live) for live in state["live"]]
        depth = len(state["live"][0][0])
        num_emitted = len(sequence.tokens)
        while beams and depth < limit and not self._is_finished(beams, finished, depth, limit):
            results = yield [beam.sequence.score() for beam in beams]
            expansions = self._expand(beams, [scores.distribution(-1) for scores in results])
            depth += 1
            beams = self._select(sequence, beams, results, expansions, finished, depth)
            state["live"] = [
                (beam.sequence.tokens[num_emitted:], beam.total, beam.logprobs) for beam in beams
            ]
        if depth >= limit:  # else the live hypotheses are not whole texts
            for beam in beams:
                score = self._hypothesis_score(beam.total, depth)
                text = RankedText(score, beam.sequence.tokens[num_emitted:], beam.logprobs)
                finished.append(text)
            finished.sort(key=lambda text: -text.score)
        for beam in beams:
            beam.sequence.release()
        if not finished:
            raise ConstraintError("the constraint allows none of the tokens that may come here")
        sequence.state[RANKED] = finished
        sequence.emit(finished[0].tokens, logprobs=finished[0].logprobs)

    @staticmethod
    def _beam_of(sequence: Sequence, tokens: list[int], total: float, logprobs: list[Any]) -> _Beam:
        branch = sequence.fork()
        for token in tokens:
            branch.append(token)
        return _Beam(branch, total, logprobs)

    def _hypothesis_score(self, total: float, length: int) -> float:
        return total / math.pow(max(1, length), self.penalty)

    def _is_finished(
        self, beams: list[_Beam], finished: list[RankedText], depth: int, limit: int
    ) -> bool:
        """Whether no live beam can still score higher than the worst of `width` finished ones."""
        if len(finished) < self.width:
            return False
        if self.early:
            return True
        final_length = limit if self.penalty > 0 else max(1, depth)
        best = max(self._hypothesis_score(beam.total, final_length) for beam in beams)
        return best <= finished[-1].score

    def _expand(
        self, beams: list[_Beam], distributions: list[Distribution]
    ) -> list[tuple[float, int, int]]:
        """The best `2 * width` continuations as (total log-probability, beam index, token)."""
        expansions: list[tuple[float, int, int]] = []
        for number, (beam, distribution) in enumerate(zip(beams, distributions, strict=True)):
            weights, total = exponentials(distribution.scores)
            index = _largest(weights, 2 * self.width)
            ids = index if distribution.tokens is None else distribution.tokens[index]
            logprobs = np.log(weights[index].astype(np.float64) / total)
            expansions += [
                (beam.total + float(logprob), number, int(token))
                for logprob, token in zip(logprobs, ids, strict=True)
            ]
        return sorted(expansions, key=lambda item: (-item[0], item[1], item[2]))[: 2 * self.width]

    def _select(
        self,
        sequence: Sequence,
        beams: list[_Beam],
        results: list[Scores],
        expansions: list[tuple[float, int, int]],
        finished: list[RankedText],
        depth: int,
    ) -> list[_Beam]:
        """The `width` beams that go on; hypotheses that end move to `finished`."""

        def logprobs(number: int, token: int) -> list[Any]:
            if sequence.compute_logprobs is None:
                return []
            scores = results[number]
            entry = sequence.compute_logprobs(scores.row(-1), token, scores.sampler_after(-1))
            return [*beams[number].logprobs, entry]

        chosen: list[tuple[float, int, int, list[Any]]] = []
        for rank, (total, number, token) in enumerate(expansions):
            branch = beams[number].sequence
            if branch.stops_at(token):
                if rank < self.width:
                    tokens = branch.tokens[len(branch.tokens) - depth + 1 :] if depth > 1 else []
                    score = self._hypothesis_score(total, depth)
                    text = RankedText(score, [*tokens, token], logprobs(number, token))
                    finished.append(text)
                    finished.sort(key=lambda text: -text.score)
                    del finished[self.width :]
            elif len(chosen) < self.width:
                chosen.append((total, number, token, logprobs(number, token)))
        selected: list[_Beam] = []
        parents = [number for _, number, _, _ in chosen]
        for i, (total, number, token, entries) in enumerate(chosen):
            parent = beams[number].sequence
            branch = parent.branch() if number in parents[i + 1 :] else parent
            selected.append(_Beam(branch, total, entries))
            branch.append(token)
        for number, beam in enumerate(beams):
            if number not in parents:
                beam.sequence.release()
        return selected


def _largest(weights: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest weights, which are relative to the largest, without zeros;
    ties to the lowest indices. Mostly there are enough that are not tiny, which are few."""
    index = np.flatnonzero(weights >= np.float32(_NOT_TINY))
    if len(index) < count:
        index = np.flatnonzero(weights)
    kept: np.ndarray = index[largest(weights[index], count)]
    return kept
