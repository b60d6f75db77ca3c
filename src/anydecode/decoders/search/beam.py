"""Beam search (Graves, arXiv:1211.3711; length penalty as in Wu et al., arXiv:1609.08144, in the
form `sum / length ** penalty` that most libraries use)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.sampling.candidates import Distribution
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


@dataclass(eq=False)
class _Beam:
    sequence: Sequence
    total: float


@register(
    Card(
        "beam",
        "search",
        paper="Sequence Transduction with Recurrent Neural Networks (arXiv:1211.3711)",
        exactness="lossy",
        summary="Keeps the most likely partial answers and says the best at the end.",
        works_with=("constraints", "penalties", "guidance", "batches", "adapters"),
        deviations=("the text is emitted when the search ends, not while it runs",),
    )
)
class Beam(Decoder):
    """`width` hypotheses; a finished one is worth `sum of log-probabilities / tokens ** penalty`.

    Penalties, bans and constraints of the request act on the scores; temperature and truncations do
    not. With width 1 it says what greedy decoding says.
    """

    can_sample = False

    def __init__(self, width: int = 4, penalty: float = 1.0, early: bool = False) -> None:
        if width < 1:
            raise InvalidRequestError("a beam needs a width of at least 1")
        if not -50 <= penalty <= 50:  # beyond, lengths raised to it are no numbers
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
        state = sequence.state.setdefault("beam", {"live": [([], 0.0)], "finished": []})
        finished: list[tuple[float, list[int]]] = state["finished"]
        beams = [self._grown(sequence, tokens, total) for tokens, total in state["live"]]
        depth = len(state["live"][0][0])
        said = len(sequence.tokens)
        while beams and depth < limit and not self._settled(beams, finished, depth, limit):
            answers = yield [beam.sequence.score() for beam in beams]
            expansions = self._expand(beams, [scores.distribution(-1) for scores in answers])
            depth += 1
            beams = self._select(beams, expansions, finished, depth)
            state["live"] = [(b.sequence.tokens[said:], b.total) for b in beams]
        finished += [
            (self._worth(beam.total, depth), beam.sequence.tokens[said:]) for beam in beams
        ]
        best = max(finished, key=lambda hypothesis: hypothesis[0])[1]
        for beam in beams:
            beam.sequence.release()
        sequence.emit(best)

    @staticmethod
    def _grown(sequence: Sequence, tokens: list[int], total: float) -> _Beam:
        branch = sequence.fork()
        for token in tokens:
            branch.append(token)
        return _Beam(branch, total)

    def _worth(self, total: float, length: int) -> float:
        return total / math.pow(max(1, length), self.penalty)

    def _settled(
        self, beams: list[_Beam], finished: list[tuple[float, list[int]]], depth: int, limit: int
    ) -> bool:
        """Whether no live beam can still beat the worst of `width` finished ones."""
        if len(finished) < self.width:
            return False
        if self.early:
            return True
        horizon = limit if self.penalty > 0 else max(1, depth)
        best = max(self._worth(beam.total, horizon) for beam in beams)
        return best <= min(worth for worth, _ in finished)

    def _expand(
        self, beams: list[_Beam], distributions: list[Distribution]
    ) -> list[tuple[float, int, int]]:
        """The best 2 x width continuations as (total, beam, token)."""
        found: list[tuple[float, int, int]] = []
        for number, (beam, distribution) in enumerate(zip(beams, distributions, strict=True)):
            with np.errstate(divide="ignore"):
                logs = np.log(distribution.probabilities())
            keep = min(2 * self.width, len(logs))
            index = np.argpartition(-logs, keep - 1)[:keep]
            ids = index if distribution.tokens is None else distribution.tokens[index]
            found += [
                (beam.total + float(log), number, int(token))
                for log, token in zip(logs[index], ids, strict=True)
                if np.isfinite(log)
            ]
        return sorted(found, key=lambda one: (-one[0], one[1], one[2]))[: 2 * self.width]

    def _select(
        self,
        beams: list[_Beam],
        expansions: list[tuple[float, int, int]],
        finished: list[tuple[float, list[int]]],
        depth: int,
    ) -> list[_Beam]:
        chosen: list[tuple[float, int, int]] = []
        for rank, (total, number, token) in enumerate(expansions):
            branch = beams[number].sequence
            if branch.stops_at(token):
                if rank < self.width:
                    tokens = branch.tokens[len(branch.tokens) - depth + 1 :] if depth > 1 else []
                    finished.append((self._worth(total, depth), [*tokens, token]))
                    finished.sort(key=lambda hypothesis: -hypothesis[0])
                    del finished[self.width :]
            elif len(chosen) < self.width:
                chosen.append((total, number, token))
        kept: list[_Beam] = []
        uses = [number for _, number, _ in chosen]
        for i, (total, number, token) in enumerate(chosen):
            parent = beams[number].sequence
            branch = parent.branch() if number in uses[i + 1 :] else parent
            kept.append(_Beam(branch, total))
            branch.append(token)
        for number, beam in enumerate(beams):
            if number not in uses:
                beam.sequence.release()
        return kept
