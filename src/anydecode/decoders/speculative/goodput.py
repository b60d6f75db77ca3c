"""Draft lengths chosen by expected tokens per cost.

SmartSpec takes the length with the best goodput over all running sequences (Liu et al., "Optimizing
Speculative Decoding for Serving Large Language Models Using Goodput", arXiv:2406.14066). The bandit
takes the best length for an acceptance rate drawn by Thompson sampling (as in Liu et al., EESD,
arXiv:2406.03853).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

from anydecode import catalogue
from anydecode.catalogue import Card, register
from anydecode.decoders.framework.speculation import (
    DraftBudget,
    Drafter,
    SpeculationRound,
    Speculative,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


@dataclass(frozen=True)
class LinearCost:
    """The cost of a pass: `fixed` + `per_row` * rows + `per_position` * context, in any unit."""

    fixed: float = 1.0
    per_row: float = 0.1
    per_position: float = 0.0

    def seconds(self, rows: int, context: int) -> float:
        """The cost of a pass over `rows` rows after `context` positions."""
        return self.fixed + self.per_row * rows + self.per_position * context


class DraftCosts:
    """The costs of passes and drafts: `given` by the user, else measured by the engine, else a
    default."""

    def __init__(self, given: LinearCost | None = None) -> None:
        self.given = given
        self.per_draft = 0.0

    def cost(self, sequence: Sequence, rows: int, context: int, drafts: int) -> float:
        """The cost of `drafts` drafts and a pass over `rows` rows after `context` positions."""
        if self.given is not None:
            return self.given.seconds(rows, context)
        if sequence.cost_model is None:
            return _DEFAULT_COST.seconds(rows, context)
        return sequence.cost_model.seconds(rows, context) + self.per_draft * drafts

    def observe(self, round: SpeculationRound) -> None:
        """Update the moving average of the seconds per draft."""
        if len(round.tree):
            self.per_draft += 0.1 * (round.draft_seconds / len(round.tree) - self.per_draft)


_DEFAULT_COST = LinearCost()


def user_cost(fixed: float | None, per_row: float, per_position: float = 0.0) -> LinearCost | None:
    """The costs given by the user; None without `fixed`, so that they are measured."""
    if fixed is None:
        return None
    if min(fixed, per_row, per_position) < 0 or fixed + per_row <= 0:
        raise InvalidRequestError(
            "the costs of a pass must not be negative, and fixed or per_row must be above 0"
        )
    return LinearCost(fixed, per_row, per_position)


def expected_tokens(rate: float, size: int) -> float:
    """Expected tokens of a round with a chain of `size` drafts, each accepted with probability
    `rate`: (1 - rate^(size + 1)) / (1 - rate)."""
    return float(size + 1) if rate >= 1 else (1 - rate ** (size + 1)) / (1 - rate)


class RunningSet:
    """The sequences that one decoder is decoding. A new sequence starts with the acceptance rate of
    the earlier ones."""

    def __init__(self, costs: DraftCosts, rate: float = 0.6) -> None:
        self.costs = costs
        self.rate = rate
        self.running: dict[Sequence, GoodputBudget] = {}

    def goodput(self, sequence: Sequence, size: int) -> float:
        """Expected tokens per cost if every running sequence drafts `size` tokens. Sequences of
        other decoders count with one row each."""
        num_own = len(self.running)
        num_others = (
            0
            if sequence.cost_model is None
            else max(0, sequence.cost_model.num_others() + 1 - num_own)
        )
        tokens = sum(expected_tokens(b.rate, size) for b in self.running.values())
        context = sum(running.length for running in self.running)
        rows = num_own * (size + 1) + num_others
        return (tokens + num_others) / self.costs.cost(sequence, rows, context, num_own * size)


class GoodputBudget(DraftBudget):
    """The common draft length with the most expected tokens per cost over all running sequences. It
    changes only if another length is better by more than `margin`."""

    def __init__(self, load: RunningSet, max_size: int, margin: float = 0.02) -> None:
        self.load = load
        self.max_size = max_size
        self.margin = margin
        self.rate = load.rate
        self._size = 0

    def size(self, sequence: Sequence) -> int:
        goodputs = [self.load.goodput(sequence, size) for size in range(self.max_size + 1)]
        best = int(np.argmax(goodputs))
        if goodputs[best] > goodputs[self._size] * (1 + self.margin):
            self._size = best
        return self._size

    def observe(self, round: SpeculationRound) -> None:
        """Update the acceptance rate; rounds without drafts do not count."""
        self.load.costs.observe(round)
        if len(round.tree):
            num_verified = min(len(round.tree), round.num_accepted + 1)
            rate = round.num_accepted / num_verified
            self.rate += 0.1 * (rate - self.rate)
            self.load.rate += 0.02 * (rate - self.load.rate)


class SmartSpec(Speculative):
    """Decodes with `drafter` and the draft length of best goodput for the running sequences."""

    def __init__(self, drafter: Drafter, max_size: int, cost: LinearCost | None = None) -> None:
        super().__init__(drafter, max_size)
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
    """Thompson sampling: an acceptance rate is drawn from its posterior, Beta(accepted + 1,
    rejected + 1), and the draft length that is best at this rate is used. Counts decay by `memory`
    per round.
    """

    def __init__(self, sequence: Sequence, costs: DraftCosts, max_size: int, memory: float) -> None:
        self.costs = costs
        self.max_size = max_size
        self.memory = memory
        self.accepted = 0.0
        self.rejected = 0.0
        self._random = Random(f"{sequence.noise.seed}/{sequence.noise.stream}")

    def size(self, sequence: Sequence) -> int:
        rate = self._random.betavariate(self.accepted + 1, self.rejected + 1)
        num_others = 0 if sequence.cost_model is None else sequence.cost_model.num_others()

        def goodput(size: int) -> float:
            rows = size + 1 + num_others
            return expected_tokens(rate, size) / self.costs.cost(
                sequence, rows, sequence.length, size
            )

        return max(range(self.max_size + 1), key=goodput)

    def observe(self, round: SpeculationRound) -> None:
        num_drafts = len(round.tree)
        self.costs.observe(round)
        if num_drafts:
            has_rejection = round.num_accepted < num_drafts
            self.accepted = self.memory * self.accepted + round.num_accepted
            self.rejected = self.memory * self.rejected + has_rejection


def chain_drafter(key: str) -> Drafter:
    """The drafter of the speculative method `key`."""
    method = catalogue.build(key)
    if not isinstance(method, Speculative):
        raise InvalidRequestError(f"{key!r} has no drafter: give a speculative method with one")
    return method.drafter


_WORKS_WITH = ("constraints", "samplers", "guidance", "batches", "adapters")


@register(
    Card(
        "smartspec",
        "speculative",
        paper="SmartSpec (arXiv:2406.14066)",
        exactness="token-exact",
        summary="The draft length with the best goodput at the present load.",
        works_with=_WORKS_WITH,
        deviations=(
            "one length for all sequences; the paper may choose one per request",
            "drafts count as chains, whatever their shape; the paper cuts trees to their best n"
            " nodes",
            "costs are measured while the engine runs, or given; the paper profiles them"
            " beforehand",
            "a length is kept until another is better by 2 %",
            "sequences of other decoders count with one row each",
        ),
    )
)
def smartspec(
    drafter: str = "prompt-lookup",
    max_drafts: int = 8,
    fixed: float | None = None,
    per_row: float = 0.1,
    per_position: float = 0.0,
) -> SmartSpec:
    """SmartSpec: draft lengths by goodput.

    Args:
        drafter: Key of the speculative method that drafts.
        max_drafts: Maximum draft length.
        fixed: Fixed cost of a pass; if absent, all costs are measured.
        per_row: Cost per row.
        per_position: Cost per position of context.
    """
    cost = user_cost(fixed, per_row, per_position)
    return SmartSpec(chain_drafter(drafter), max_drafts, cost)


@register(
    Card(
        "bandit",
        "speculative",
        paper="EESD (arXiv:2406.03853), its Thompson sampling of the draft length",
        exactness="token-exact",
        summary="A bandit learns the draft length by Thompson sampling.",
        works_with=_WORKS_WITH,
        deviations=(
            "any drafter; the paper's early exit with a trained layer is not included",
            "one rate is drawn per round, and the length with the most expected tokens per"
            " measured cost is used; the paper draws at every draft whether to continue",
            "the posterior decays; its calibration by the drafter's confidence is not included",
        ),
    )
)
def bandit(
    drafter: str = "prompt-lookup",
    max_drafts: int = 8,
    memory: float = 0.95,
    fixed: float | None = None,
    per_row: float = 0.1,
) -> Speculative:
    """Draft lengths by Thompson sampling.

    Args:
        drafter: Key of the speculative method that drafts.
        max_drafts: Maximum draft length.
        memory: Decay of the counts per round, above 0 and at most 1.
        fixed: Fixed cost of a pass; if absent, all costs are measured.
        per_row: Cost per row.
    """
    if not 0 < memory <= 1:
        raise InvalidRequestError("bandit needs 0 < memory <= 1")
    costs = DraftCosts(user_cost(fixed, per_row))
    return Speculative(
        chain_drafter(drafter),
        max_drafts,
        budget=lambda sequence: BanditBudget(sequence, costs, max_drafts, memory),
    )
