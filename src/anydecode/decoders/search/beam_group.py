"""A group of beams that compete with each other: the part that beam search and diverse beam search
share."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from anydecode.decoders.framework.branches import share_prefixes
from anydecode.sampling.candidates import Distribution
from anydecode.scoring.ranked import RankedText
from anydecode.scoring.score import ActionResult, DecoderAction, ScoreRequest, Scores
from anydecode.scoring.sequence import Sequence


@dataclass(frozen=True)
class LengthRule:
    """How many hypotheses a group keeps, how their length counts, and when the search ends.

    Args:
        width: How many hypotheses are kept.
        penalty: The exponent of the length.
        early: Stop as soon as `width` hypotheses have finished, even if a live one could still
            get a higher score.
    """

    width: int
    penalty: float
    early: bool = False

    def score(self, total: float, length: int) -> float:
        """The score of a hypothesis."""
        return total / math.pow(max(1, length), self.penalty)

    def is_finished(
        self, totals: list[float], finished: list[RankedText], depth: int, limit: int
    ) -> bool:
        """Whether no live hypothesis can still score higher than the worst of `width` finished
        ones, which are in order."""
        if len(finished) < self.width:
            return False
        if self.early:
            return True
        final_length = limit if self.penalty > 0 else max(1, depth)
        best = max(self.score(total, final_length) for total in totals)
        return best <= finished[-1].score


@dataclass(frozen=True)
class Hypothesis:
    """A live hypothesis as plain data: tokens, sum of log-probabilities less `costs`, and requested
    log-probabilities. `costs` are the sum of what was subtracted."""

    tokens: list[int]
    total: float = 0.0
    costs: float = 0.0
    logprobs: list[Any] = field(default_factory=list)


@dataclass
class GroupState:
    """What a group needs to start again: the live hypotheses, the finished texts, best first, and
    the number of tokens of a live hypothesis."""

    live: list[Hypothesis] = field(default_factory=lambda: [Hypothesis([])])
    finished: list[RankedText] = field(default_factory=list)
    depth: int = 0


@dataclass(frozen=True)
class _Expansion:
    """A hypothesis with one more token."""

    total: float
    costs: float
    number: int
    token: int


class BeamGroup:
    """The live hypotheses of one group, each with its branch of `sequence`.

    Args:
        rule: Width and scores.
        sequence: The sequence that the search continues.
        state: Changed as the search goes on.
    """

    def __init__(self, rule: LengthRule, sequence: Sequence, state: GroupState) -> None:
        self.rule = rule
        self.sequence = sequence
        self.state = state
        self._limit = sequence.remaining
        self._branches: list[Sequence] = []

    def open(self) -> Generator[DecoderAction, ActionResult, None]:
        """Open the branches of the live hypotheses. The prompt has been scored."""
        for hypothesis in self.state.live:
            branch = self.sequence.fork()
            for token in hypothesis.tokens:
                branch.append(token)
            self._branches.append(branch)
        yield from share_prefixes(self._branches)

    @property
    def is_active(self) -> bool:
        """Whether the search goes on."""
        state = self.state
        if not state.live or state.depth >= self._limit:
            return False
        totals = [hypothesis.total for hypothesis in state.live]
        return not self.rule.is_finished(totals, state.finished, state.depth, self._limit)

    def requests(self) -> list[ScoreRequest]:
        """One request per live hypothesis."""
        return [branch.score(samples=False) for branch in self._branches]

    def advance(self, results: list[Scores], costs: Mapping[int, float]) -> None:
        """Extend the hypotheses by one token.

        Args:
            results: The results of `requests`.
            costs: By token, what is subtracted from the log-probability of its choice.
        """
        distributions = [_distribution(scores) for scores in results]
        self._select(results, self._expand(distributions, costs))

    def texts(self) -> list[RankedText]:
        """The texts that were found, best first. Frees the memory of the live hypotheses."""
        state = self.state
        if state.depth >= self._limit:  # else the live hypotheses are not whole texts
            for one in state.live:
                self._finish(one)
        for branch in self._branches:
            branch.release()
        self._branches, state.live = [], []
        return state.finished

    def _finish(self, hypothesis: Hypothesis) -> None:
        score = self.rule.score(hypothesis.total, len(hypothesis.tokens))
        text = RankedText(score, hypothesis.tokens, hypothesis.logprobs, hypothesis.costs)
        self.state.finished.append(text)
        self.state.finished.sort(key=lambda text: -text.score)

    def _expand(
        self, distributions: list[Distribution], costs: Mapping[int, float]
    ) -> list[_Expansion]:
        """The best `2 * width` continuations."""
        count = 2 * self.rule.width
        ranked: list[tuple[float, int, int, float]] = []
        for number, (hypothesis, distribution) in enumerate(
            zip(self.state.live, distributions, strict=True)
        ):
            tokens, logprobs = distribution.most_probable(count + len(costs))
            for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
                cost = costs.get(token, 0.0)
                ranked.append((-(hypothesis.total + (logprob - cost)), number, token, cost))
        ranked.sort()
        return [
            _Expansion(-negative, self.state.live[number].costs + cost, number, token)
            for negative, number, token, cost in ranked[:count]
        ]

    def _select(self, results: list[Scores], expansions: list[_Expansion]) -> None:
        """Keep `width` hypotheses; those that end become finished texts."""
        state, width = self.state, self.rule.width
        state.depth += 1
        chosen: list[tuple[int, Hypothesis]] = []
        for rank, one in enumerate(expansions):
            ends = self._branches[one.number].stops_at(one.token)
            if rank >= width if ends else len(chosen) == width:
                continue
            hypothesis = Hypothesis(
                [*state.live[one.number].tokens, one.token],
                one.total,
                one.costs,
                self._logprobs(results[one.number], one),
            )
            if ends:
                self._finish(hypothesis)
                del state.finished[width:]
            else:
                chosen.append((one.number, hypothesis))
        parents = [number for number, _ in chosen]
        branches = []
        for i, (number, hypothesis) in enumerate(chosen):
            parent = self._branches[number]
            branch = parent.branch() if number in parents[i + 1 :] else parent
            branch.append(hypothesis.tokens[-1])
            branches.append(branch)
        for number, branch in enumerate(self._branches):
            if number not in parents:
                branch.release()
        self._branches, state.live = branches, [hypothesis for _, hypothesis in chosen]

    def _logprobs(self, scores: Scores, one: _Expansion) -> list[Any]:
        compute = self.sequence.compute_logprobs
        if compute is None:
            return []
        entry = compute(scores.row(-1), one.token, scores.sampler_after(-1))
        return [*self.state.live[one.number].logprobs, entry]


def _distribution(scores: Scores) -> Distribution:
    """The distribution after the last row. Without processors it is a view of the row."""
    sampler = scores.sampler_after(-1)
    if sampler.is_temperature_only:
        return Distribution(None, scores.row(-1))  # at temperature 1
    return sampler.distribution(scores.row(-1))
