"""SmartSpec: the draft length with the best goodput over all running sequences (Liu et al.,
"Optimizing Speculative Decoding for Serving Large Language Models Using Goodput",
arXiv:2406.14066)."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Nested, Range, register
from anydecode.decoders.framework.acceptance import Acceptance, is_token_exact
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import (
    DraftBudget,
    Drafter,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.goodput import (
    DraftCosts,
    LinearCost,
    chain_drafter,
    expected_tokens,
    user_cost,
)
from anydecode.scoring.cost import DEFAULT_ROW_COST
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: Rounds in which the counts of a sequence, and those of all sequences of its decoder, fade to 1/e.
OWN_ROUNDS, SHARED_ROUNDS = 10, 50
#: The drafts that the rate of all sequences counts as in that of one, and those of the mean of all
#: rates, which counts in that of all sequences.
SHARED_WEIGHT, FIRST_WEIGHT = 4.0, 2.0


class FadingCounts:
    """How many drafts were tested and accepted. Counts fade in every round, drafted or not, so that
    drafts which did not pay are tried again.

    Args:
        num_rounds: Rounds in which counts fade to 1/e.
    """

    def __init__(self, num_rounds: int) -> None:
        self._fading = 1 - 1 / num_rounds
        self._accepted = self._tested = 0.0

    def record(self, num_accepted: int, num_tested: int) -> None:
        """Add a round."""
        self._accepted = self._fading * self._accepted + num_accepted
        self._tested = self._fading * self._tested + num_tested

    def mean(self, first: float = 0.5, weight: float = FIRST_WEIGHT) -> float:
        """The acceptance rate, where `first` counts as `weight` drafts; by default the mean of the
        posterior after a uniform prior."""
        return (self._accepted + weight * first) / (self._tested + weight)


class RunningSet:
    """The sequences that one decoder is decoding. A new sequence starts with the acceptance rate of
    the earlier ones. With `is_alone` a set has one sequence, beside which no other one counts."""

    def __init__(self, costs: DraftCosts, is_alone: bool = False) -> None:
        self.costs = costs
        self.is_alone = is_alone
        self.counts = FadingCounts(SHARED_ROUNDS)
        self.running: dict[Sequence, GoodputBudget] = {}

    def goodput(self, sequence: Sequence, size: int) -> float:
        """Expected tokens per cost if every running sequence drafts `size` tokens. Sequences of
        other decoders count with one row each."""
        num_own = len(self.running)
        num_running = num_own if self.is_alone else sequence.cost_model.num_others() + 1
        num_others = max(0, num_running - num_own)
        tokens = sum(expected_tokens(budget.rate, size) for budget in self.running.values())
        lengths = [running.length for running in self.running]
        rows = num_own * (size + 1) + num_others
        return (tokens + num_others) / self.costs.cost(sequence, rows, lengths, num_own * size)


class GoodputBudget(DraftBudget):
    """The common draft length with the most expected tokens per cost over all running sequences. It
    changes only if another length is better by more than `margin`."""

    def __init__(self, load: RunningSet, max_size: int, margin: float = 0.02) -> None:
        self.load = load
        self.max_size = max_size
        self.margin = margin
        self.counts = FadingCounts(OWN_ROUNDS)
        self._size = 0

    @property
    def rate(self) -> float:
        """The acceptance rate of this sequence's drafts."""
        return self.counts.mean(self.load.counts.mean(), SHARED_WEIGHT)

    def size(self, sequence: Sequence) -> int:
        goodputs = [self.load.goodput(sequence, size) for size in range(self.max_size + 1)]
        best = int(np.argmax(goodputs))
        if goodputs[best] > goodputs[self._size] * (1 + self.margin):
            self._size = best
        return self._size

    def observe(self, round: SpeculationRound) -> None:
        """Update the acceptance rates."""
        self.load.costs.observe(round)
        num_tested = min(len(round.tree), round.num_accepted + 1)
        for counts in (self.counts, self.load.counts):
            counts.record(round.num_accepted, num_tested)


class SmartSpec(Speculative):
    """Decodes with `drafter` and the draft length of best goodput for the running sequences."""

    def __init__(
        self,
        drafter: Drafter,
        max_size: int,
        cost: LinearCost | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        super().__init__(drafter, max_size, acceptance)
        self.load = RunningSet(DraftCosts(cost))

    def budget(self, sequence: Sequence) -> DraftBudget:
        exact = is_token_exact(self.acceptance)
        load = self.load if exact else RunningSet(self.load.costs, is_alone=True)
        budget = load.running[sequence] = GoodputBudget(load, self.size)
        return budget

    def decode(self, sequence: Sequence) -> Decoding:
        try:
            yield from super().decode(sequence)
        finally:
            self.load.running.pop(sequence, None)


@register(
    Card(
        "smartspec",
        "speculative",
        paper="SmartSpec (arXiv:2406.14066)",
        exactness="token-exact",
        summary="The draft length with the best goodput at the present load.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "one length for all sequences; the paper may choose one per request",
            "drafts count as chains, whatever their shape; the paper cuts trees to their best n"
            " nodes",
            "costs are measured while the engine runs, or given; the paper profiles them"
            " beforehand",
            "a length is kept until another is better by 2 %",
            "acceptance rates are fading counts after a uniform prior of all rates (the paper: a"
            " moving average whose start is not told)",
            "sequences of other decoders count with one row each",
            "with another rule than token-exact, such as acceptance='rejection', the paper's, a row"
            " costs a tenth of a pass where no costs are given, so that no text depends on measured"
            " times, and each request is its own load, so that no text depends on others",
        ),
        remote={
            "drafter": Nested(),
            "max_drafts": Range(1, 64),
            "fixed": Range(0, 100),
            "per_row": Range(0, 100),
            "per_position": Range(0, 100),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def smartspec(
    drafter: str = "prompt-lookup",
    max_drafts: int = 8,
    fixed: float | None = None,
    per_row: float = 0.1,
    per_position: float = 0.0,
    acceptance: str | Acceptance = "token-exact",
) -> SmartSpec:
    """SmartSpec: draft lengths by goodput.

    Args:
        drafter: Key of the speculative method that drafts.
        max_drafts: Maximum draft length.
        fixed: Fixed cost of a pass; if absent, all costs are measured.
        per_row: Cost per row.
        per_position: Cost per position of context.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    cost, rule = user_cost(fixed, per_row, per_position), acceptance_rule(acceptance)
    if cost is None and not is_token_exact(rule):
        cost = LinearCost(1.0, DEFAULT_ROW_COST)
    return SmartSpec(chain_drafter(drafter, rule), max_drafts, cost, rule)
