"""How much to draft, by what it is worth and what it costs: SmartSpec's goodput (Liu et al.,
"Optimizing Speculative Decoding for Serving Large Language Models Using Goodput", arXiv:2406.14066)
and a bandit by Thompson sampling (as in Liu et al., EESD, arXiv:2406.03853)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

from anydecode import catalogue
from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import DraftBudget, Drafter, SpeculationRound, Speculative
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


@dataclass(frozen=True)
class LinearCost:
    """A pass costs `fixed` + `per_row` times its rows + `per_position` times the context behind
    them; any unit."""

    fixed: float = 1.0
    per_row: float = 0.1
    per_position: float = 0.0

    def seconds(self, rows: int, context: int) -> float:
        """The cost of a pass."""
        return self.fixed + self.per_row * rows + self.per_position * context


class DraftCosts:
    """What passes and drafts cost: `known`, or what the engine has measured, or a guess."""

    def __init__(self, known: LinearCost | None = None) -> None:
        self.known = known
        self.per_draft = 0.0

    def of(self, sequence: Sequence, rows: int, context: int, drafts: int) -> float:
        """The cost of `drafts` drafts and a pass over `rows` rows behind `context` positions."""
        if self.known is not None:
            return self.known.seconds(rows, context)
        if sequence.cost_model is None:
            return _GUESS.seconds(rows, context)
        return sequence.cost_model.seconds(rows, context) + self.per_draft * drafts

    def observe(self, round: SpeculationRound) -> None:
        """Follow what a draft takes, in seconds."""
        if len(round.tree):
            self.per_draft += 0.1 * (round.draft_seconds / len(round.tree) - self.per_draft)


_GUESS = LinearCost()


def given_cost(fixed: float | None, per_row: float, per_position: float = 0.0) -> LinearCost | None:
    """The costs a user gave; None without `fixed`, which leaves them to be measured."""
    if fixed is None:
        return None
    if min(fixed, per_row, per_position) < 0 or fixed + per_row <= 0:
        raise InvalidRequestError(
            "costs of a pass must not be negative, and fixed or per_row be above 0"
        )
    return LinearCost(fixed, per_row, per_position)


def expected_tokens(rate: float, size: int) -> float:
    """Tokens a chain of `size` drafts gives if each is accepted with `rate`:
    (1 - a^(k + 1)) / (1 - a)."""
    return float(size + 1) if rate >= 1 else (1 - rate ** (size + 1)) / (1 - rate)


class RunningSet:
    """The sequences one decoder works on. A new one takes the acceptance rate of those before."""

    def __init__(self, costs: DraftCosts, rate: float = 0.6) -> None:
        self.costs = costs
        self.rate = rate
        self.running: dict[Sequence, GoodputBudget] = {}

    def goodput(self, sequence: Sequence, size: int) -> float:
        """Expected tokens per cost if every running sequence drafts `size` tokens. Sequences of
        other decoders take part with one row each."""
        own = len(self.running)
        others = (
            0 if sequence.cost_model is None else max(0, sequence.cost_model.num_others() + 1 - own)
        )
        tokens = sum(expected_tokens(b.rate, size) for b in self.running.values())
        context = sum(running.length for running in self.running)
        rows = own * (size + 1) + others
        return (tokens + others) / self.costs.of(sequence, rows, context, own * size)


class GoodputBudget(DraftBudget):
    """The common draft length that gives the most tokens per cost over all sequences that are
    decoded now. Stays with the last one unless another is better by more than `margin`."""

    def __init__(self, load: RunningSet, largest: int, margin: float = 0.02) -> None:
        self.load = load
        self.largest = largest
        self.margin = margin
        self.rate = load.rate
        self._size = 0

    def size(self, sequence: Sequence) -> int:
        worth = [self.load.goodput(sequence, size) for size in range(self.largest + 1)]
        best = int(np.argmax(worth))
        if worth[best] > worth[self._size] * (1 + self.margin):
            self._size = best
        return self._size

    def observe(self, round: SpeculationRound) -> None:
        """The rate follows rounds with drafts only."""
        self.load.costs.observe(round)
        if len(round.tree):
            tried = min(len(round.tree), round.num_accepted + 1)
            seen = round.num_accepted / tried
            self.rate += 0.1 * (seen - self.rate)
            self.load.rate += 0.02 * (seen - self.load.rate)


class SmartSpec(Speculative):
    """`drafter` with the draft length of best goodput for the sequences that run now."""

    def __init__(self, drafter: Drafter, largest: int, cost: LinearCost | None = None) -> None:
        super().__init__(drafter, largest)
        self.load = RunningSet(DraftCosts(cost))

    def budget(self, sequence: Sequence) -> DraftBudget:
        budget = GoodputBudget(self.load, self.size)
        self.load.running[sequence] = budget
        return budget

    def decode(self, sequence: Sequence) -> Decoding:
        try:
            yield from super().decode(sequence)
        finally:
            self.load.running.pop(sequence, None)


class BanditBudget(DraftBudget):
    """Thompson sampling: a rate of acceptance drawn from its posterior, Beta(accepted + 1,
    rejected + 1), and the size that is best if that were the rate. Old rounds fade by `memory`."""

    def __init__(self, sequence: Sequence, costs: DraftCosts, largest: int, memory: float) -> None:
        self.costs = costs
        self.largest = largest
        self.memory = memory
        self.accepted = 0.0
        self.rejected = 0.0
        self._random = Random(f"{sequence.noise.seed}/{sequence.noise.stream}")

    def size(self, sequence: Sequence) -> int:
        rate = self._random.betavariate(self.accepted + 1, self.rejected + 1)
        others = 0 if sequence.cost_model is None else sequence.cost_model.num_others()

        def worth(size: int) -> float:
            rows = size + 1 + others
            return expected_tokens(rate, size) / self.costs.of(
                sequence, rows, sequence.length, size
            )

        return max(range(self.largest + 1), key=worth)

    def observe(self, round: SpeculationRound) -> None:
        drafted = len(round.tree)
        self.costs.observe(round)
        if drafted:
            missed = round.num_accepted < drafted
            self.accepted = self.memory * self.accepted + round.num_accepted
            self.rejected = self.memory * self.rejected + missed


def chain_drafter(key: str) -> Drafter:
    """The drafter of the speculative method `key`."""
    method = catalogue.build(key)
    if not isinstance(method, Speculative):
        raise InvalidRequestError(f"{key!r} has no drafter whose length could be chosen")
    return method.drafter


_WORKS = ("constraints", "samplers", "guidance", "batches", "adapters")


@register(
    Card(
        "smartspec",
        "speculative",
        paper="SmartSpec (arXiv:2406.14066)",
        exactness="token-exact",
        summary="The draft length with the best goodput at the present load.",
        works_with=_WORKS,
        deviations=(
            "one length for all sequences; the paper may choose one for each request",
            "drafts count as chains, whatever their shape; the paper cuts trees to their best n",
            "a pass costs what the engine measured as it ran, or what is given; the paper profiles",
            "a length stays until another is better by 2 %",
            "sequences of other decoders count with one row each",
        ),
    )
)
def smartspec(
    drafter: str = "prompt-lookup",
    largest: int = 8,
    fixed: float | None = None,
    per_row: float = 0.1,
    per_position: float = 0.0,
) -> SmartSpec:
    """`drafter` is a speculative method's key. With `fixed`, the costs of a pass are given;
    else they are what the engine measured."""
    cost = given_cost(fixed, per_row, per_position)
    return SmartSpec(chain_drafter(drafter), largest, cost)


@register(
    Card(
        "bandit",
        "speculative",
        paper="EESD (arXiv:2406.03853), its Thompson sampling of the draft length",
        exactness="token-exact",
        summary="A bandit learns how many drafts pay, by Thompson sampling.",
        works_with=_WORKS,
        deviations=(
            "any drafter; the paper's early exit with its trained layer is not here",
            "one rate is drawn a round, and the length of best expected tokens per measured cost"
            " taken; the paper draws at every draft whether to go on",
            "the posterior fades; its calibration by the drafter's confidence is left out",
        ),
    )
)
def bandit(
    drafter: str = "prompt-lookup",
    largest: int = 8,
    memory: float = 0.95,
    fixed: float | None = None,
    per_row: float = 0.1,
) -> Speculative:
    """`drafter` is a speculative method's key. With `fixed`, the costs of a pass are given;
    else they are what the engine measured."""
    if not 0 < memory <= 1:
        raise InvalidRequestError("bandit needs 0 < memory <= 1")
    costs = DraftCosts(given_cost(fixed, per_row))
    return Speculative(
        chain_drafter(drafter),
        largest,
        budget=lambda sequence: BanditBudget(sequence, costs, largest, memory),
    )
