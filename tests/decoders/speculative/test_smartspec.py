"""SmartSpec passes its certificate; wrong goodputs do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anydecode import catalogue
from anydecode.decoders.framework.speculation import SpeculationRound
from anydecode.decoders.speculative import goodput, smartspec
from anydecode.decoders.speculative.smartspec import FadingCounts, GoodputBudget, RunningSet
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("smartspec")


def test_expected_tokens_without_the_bonus_token_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        smartspec, "expected_tokens", lambda rate, size: goodput.expected_tokens(rate, size) - 1
    )
    assert_rejected("smartspec")


def test_a_rate_over_drafts_that_were_not_tested_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def observe(self: GoodputBudget, round: SpeculationRound) -> None:
        self.load.costs.observe(round)
        for counts in (self.counts, self.load.counts):
            counts.record(round.num_accepted, len(round.tree))

    monkeypatch.setattr(GoodputBudget, "observe", observe)
    assert_rejected("smartspec")


def test_a_rate_that_starts_elsewhere_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    mean = FadingCounts.mean
    monkeypatch.setattr(
        FadingCounts, "mean", lambda self, first=0.6, weight=2.0: mean(self, first, weight)
    )
    assert_rejected("smartspec")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "value"),
    [("OWN_ROUNDS", 1000), ("OWN_ROUNDS", 12), ("SHARED_ROUNDS", 60), ("SHARED_WEIGHT", 3.0)],
)
def test_counts_that_fade_or_weigh_otherwise_are_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    monkeypatch.setattr(smartspec, name, value)
    assert_rejected("smartspec")


def test_a_goodput_of_one_sequence_alone_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(self: RunningSet, sequence: Sequence, size: int) -> float:
        rate = self.running[sequence].rate
        cost = self.costs.cost(sequence, size + 1, [sequence.length], size)
        return goodput.expected_tokens(rate, size) / cost

    monkeypatch.setattr(RunningSet, "goodput", alone)
    assert_rejected("smartspec")


@pytest.mark.parametrize("part", ["tokens", "rows"])
def test_a_goodput_without_sequences_of_other_decoders_is_rejected(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def without(self: RunningSet, sequence: Sequence, size: int) -> float:
        num_own = len(self.running)
        others = max(0, sequence.cost_model.num_others() + 1 - num_own)
        tokens = sum(goodput.expected_tokens(one.rate, size) for one in self.running.values())
        rows, lengths = num_own * (size + 1), [running.length for running in self.running]
        if part == "tokens":
            rows += others
        else:
            tokens += others
        return tokens / self.costs.cost(sequence, rows, lengths, num_own * size)

    monkeypatch.setattr(RunningSet, "goodput", without)
    assert_rejected("smartspec")


def test_a_context_summed_over_the_sequences_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = goodput.DraftCosts.cost
    monkeypatch.setattr(
        goodput.DraftCosts,
        "cost",
        lambda self, sequence, rows, lengths, drafts: cost(
            self, sequence, rows, [sum(lengths)], drafts
        ),
    )
    assert_rejected("smartspec")


class FakeSequence:
    """What a budget reads of a sequence."""

    def __init__(self, num_others: int, length: int = 10) -> None:
        #: A pass over at most 8 rows costs 1, every further row 1 more.
        self.cost_model = SimpleNamespace(
            seconds=lambda rows, context: float(max(1, rows - 7)), num_others=lambda: num_others
        )
        self.length = length


def budgets_of(*sequences: Any, rate: float = 1.0, **options: Any) -> list[Any]:
    """The budgets of sequences that one decoder runs, at an acceptance rate of `rate`."""
    decoder = catalogue.build("smartspec", **options)
    budgets = [decoder.budget(sequence) for sequence in sequences]
    for budget in budgets:
        set_rate(budget, rate)
    return budgets


def set_rate(budget: Any, rate: float) -> None:
    """Let nearly all that is known of the sequence's drafts be that so many are accepted."""
    budget.counts = FadingCounts(10)
    budget.counts.record(rate * 1e12, 1e12)


@pytest.mark.parametrize(("num_others", "size"), [(0, 7), (3, 4), (6, 1), (7, 0), (20, 0)])
def test_sequences_of_other_decoders_take_a_row_each(num_others: int, size: int) -> None:
    """A round with `size` drafts that are all accepted has `size` + 1 tokens; the best size fills
    the pass to 8 rows."""
    sequence = FakeSequence(num_others)
    (budget,) = budgets_of(sequence)
    assert budget.size(sequence) == size


def test_the_goodput_counts_all_tokens_and_rows_of_a_pass() -> None:
    one, other = FakeSequence(num_others=4), FakeSequence(num_others=4)
    first, second = budgets_of(one, other)
    set_rate(second, 0.5)
    # Three sequences of other decoders; 1 + 1 + 1 and 1 + 1/2 + 1/4 tokens of the two; 2 * 3 + 3
    # rows cost 2.
    assert first.load.goodput(one, 2) == pytest.approx((3 + 1.75 + 3) / 2)
    assert first.load.goodput(one, 0) == pytest.approx((1 + 1 + 3) / 1)


def test_given_costs_count_the_context_of_every_sequence() -> None:
    one, other = FakeSequence(1, length=100), FakeSequence(1, length=300)
    first, _ = budgets_of(one, other, fixed=1.0, per_row=0.5, per_position=0.01)
    assert first.load.goodput(one, 1) == pytest.approx((2 + 2) / (1 + 0.5 * 4 + 0.01 * 400))


@pytest.mark.parametrize(("per_row", "size"), [(0.002, 8), (0.003, 0)])
def test_a_length_is_kept_until_another_is_better_by_two_percent(per_row: float, size: int) -> None:
    """A pass over 9 rows costs 1.6 % or 2.4 % more than one over 1 row."""
    sequence = FakeSequence(0)
    (budget,) = budgets_of(sequence, fixed=1.0, per_row=per_row)
    assert budget.size(sequence) == 8
    set_rate(budget, 0.0)
    assert budget.size(sequence) == size


def observe(budget: Any, num_drafts: int, num_accepted: int) -> None:
    """A round whose drafting took a second."""
    budget.observe(
        SimpleNamespace(tree=[0] * num_drafts, num_accepted=num_accepted, draft_seconds=1.0)
    )


def test_rounds_update_the_rate_and_the_cost_of_drafts() -> None:
    """Drafts after the first rejected one are not verified: 2 of 3 were accepted."""
    sequence = FakeSequence(0)
    budget = catalogue.build("smartspec").budget(sequence)
    assert budget.rate == 0.5
    observe(budget, num_drafts=5, num_accepted=2)
    shared = (2 + 1) / (3 + 2)
    assert budget.load.counts.mean() == pytest.approx(shared)
    assert budget.rate == pytest.approx((2 + 4 * shared) / (3 + 4))
    tokens = 1 + budget.rate + budget.rate**2
    assert budget.load.goodput(sequence, 2) == pytest.approx(tokens / (1 + 2 * 0.1 * 1.0 / 5))


def test_drafts_that_did_not_pay_are_tried_again() -> None:
    """A draft saves time where more than a third are accepted."""
    sequence = FakeSequence(0)
    budget = catalogue.build("smartspec", fixed=1.0, per_row=0.5, max_drafts=1).budget(sequence)
    for _ in range(30):
        observe(budget, num_drafts=1, num_accepted=0)
    assert budget.size(sequence) == 0
    for _ in range(300):
        observe(budget, num_drafts=0, num_accepted=0)
    assert budget.size(sequence) == 1
