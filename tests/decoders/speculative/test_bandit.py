"""The bandit passes its certificate; wrong posteriors do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anydecode import catalogue
from anydecode.decoders.framework.speculation import SpeculationRound
from anydecode.decoders.speculative import bandit
from anydecode.decoders.speculative.bandit import BanditBudget
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("bandit")


def test_the_mean_of_the_posterior_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mean:
        def __init__(self, seed: str) -> None:
            pass

        def betavariate(self, alpha: float, beta: float) -> float:
            return alpha / (alpha + beta)

    monkeypatch.setattr(bandit, "Random", Mean)
    assert_rejected("bandit")


def test_counting_every_draft_after_the_first_rejection_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def observe(self: BanditBudget, round: SpeculationRound) -> None:
        self.costs.observe(round)
        if len(round.tree):
            self.accepted = self.memory * self.accepted + round.num_accepted
            self.rejected = self.memory * self.rejected + len(round.tree) - round.num_accepted

    monkeypatch.setattr(BanditBudget, "observe", observe)
    assert_rejected("bandit")


def test_a_posterior_that_never_forgets_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = BanditBudget.__init__
    monkeypatch.setattr(
        BanditBudget, "__init__", lambda self, *given: budget(self, *given[:-1], 1.0)
    )
    assert_rejected("bandit")


def fake_sequence(num_others: int) -> Any:
    """What a budget reads of a sequence. A pass over at most 8 rows costs 1, every further row 1
    more."""
    cost_model = SimpleNamespace(
        seconds=lambda rows, context: float(max(1, rows - 7)), num_others=lambda: num_others
    )
    noise = SimpleNamespace(seed=1, stream=0)
    return SimpleNamespace(cost_model=cost_model, length=10, noise=noise)


def fake_round(num_accepted: int, num_drafts: int) -> Any:
    return SimpleNamespace(tree=[0] * num_drafts, num_accepted=num_accepted, draft_seconds=0.0)


@pytest.mark.parametrize(("num_others", "size"), [(0, 7), (3, 4), (6, 1), (7, 0)])
def test_other_sequences_take_a_row_each(num_others: int, size: int) -> None:
    sequence = fake_sequence(num_others)
    budget = catalogue.build("bandit").budget(sequence)
    budget.accepted = 1e9  # the rate is 1
    assert budget.size(sequence) == size


def test_counts_decay_and_a_round_has_one_rejection_at_most() -> None:
    budget = catalogue.build("bandit", memory=0.5).budget(fake_sequence(0))
    budget.observe(fake_round(2, 5))
    assert (budget.accepted, budget.rejected) == (2, 1)
    budget.observe(fake_round(3, 3))
    assert (budget.accepted, budget.rejected) == (0.5 * 2 + 3, 0.5)
    budget.observe(fake_round(0, 0))  # no drafts, nothing learnt
    assert (budget.accepted, budget.rejected) == (4, 0.5)
    budget.observe(fake_round(0, 1))
    assert (budget.accepted, budget.rejected) == (2, 1.25)


def test_rejections_shorten_the_drafts() -> None:
    sequence = fake_sequence(0)
    budget = catalogue.build("bandit", fixed=1.0, per_row=0.5).budget(sequence)
    sizes = []
    for num_accepted, num_drafts in ((8, 8), (0, 8)):
        for _ in range(60):
            budget.observe(fake_round(num_accepted, num_drafts))
        sizes.append({budget.size(sequence) for _ in range(50)})
    assert min(sizes[0]) > max(sizes[1])
