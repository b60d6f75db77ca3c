"""The bandit passes its certificate; wrong posteriors do not."""

from __future__ import annotations

from random import Random
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
    class Mean(Random):
        def betavariate(self, alpha: float, beta: float) -> float:
            return alpha / (alpha + beta)

    monkeypatch.setattr(bandit, "Random", Mean)
    assert_rejected("bandit")


def test_one_rate_for_the_whole_draft_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(self: BanditBudget, sequence: Any) -> int:
        rate = self._random.betavariate(self.accepted + 1, self.rejected + 1)
        size = 1
        while size < self.max_size and self._random.random() < rate:
            size += 1
        return size

    monkeypatch.setattr(BanditBudget, "size", size)
    assert_rejected("bandit")


def test_counting_every_draft_after_the_first_rejection_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def observe(self: BanditBudget, round: SpeculationRound) -> None:
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


def fake_sequence() -> Any:
    """What a budget reads of a sequence."""
    return SimpleNamespace(noise=SimpleNamespace(seed=1, stream=0))


def fake_round(num_accepted: int, num_drafts: int) -> Any:
    return SimpleNamespace(tree=[0] * num_drafts, num_accepted=num_accepted, draft_seconds=0.0)


@pytest.mark.parametrize(("accepted", "rejected", "size"), [(1e9, 0, 8), (0, 1e9, 1)])
def test_sure_rates_draft_all_or_one(accepted: float, rejected: float, size: int) -> None:
    budget = catalogue.build("bandit").budget(fake_sequence())
    budget.accepted, budget.rejected = accepted, rejected
    assert budget.size(fake_sequence()) == size


def test_lengths_have_the_mean_of_the_posterior() -> None:
    """With the prior, every draft is followed by another with probability 1/2."""
    budget = catalogue.build("bandit").budget(fake_sequence())
    sizes = [budget.size(fake_sequence()) for _ in range(4000)]
    assert sum(sizes) / len(sizes) == pytest.approx(2 - 2**-7, abs=0.1)


def test_counts_decay_and_a_round_has_one_rejection_at_most() -> None:
    budget = catalogue.build("bandit", memory=0.5).budget(fake_sequence())
    budget.observe(fake_round(2, 5))
    assert (budget.accepted, budget.rejected) == (2, 1)
    budget.observe(fake_round(3, 3))
    assert (budget.accepted, budget.rejected) == (0.5 * 2 + 3, 0.5)
    budget.observe(fake_round(0, 0))  # no drafts, nothing learnt
    assert (budget.accepted, budget.rejected) == (4, 0.5)
    budget.observe(fake_round(0, 1))
    assert (budget.accepted, budget.rejected) == (2, 1.25)


def test_rejections_shorten_the_drafts() -> None:
    sequence = fake_sequence()
    budget = catalogue.build("bandit").budget(sequence)
    sizes = []
    for num_accepted, num_drafts in ((8, 8), (0, 8)):
        for _ in range(60):
            budget.observe(fake_round(num_accepted, num_drafts))
        sizes.append(sum(budget.size(sequence) for _ in range(50)))
    assert sizes[0] > 3 * sizes[1]
