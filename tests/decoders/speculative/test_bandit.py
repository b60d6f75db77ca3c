"""The bandit passes its certificate; wrong posteriors do not."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anydecode import catalogue
from anydecode.certification.rounds import scripted, wordy
from anydecode.certification.tiny import early_exit_checkpoint
from anydecode.decoders.framework import thompson
from anydecode.decoders.framework.thompson import Posterior
from anydecode.decoders.speculative.bandit import BanditBudget, ModelOrCopies
from anydecode.errors import AnydecodeError
from anydecode.models import early_exit
from anydecode.models.dense_layer import read_dense_layer
from certificates import assert_certified, assert_rejected
from drafted_texts import CONDITIONS, assert_text_of_plain_decoding


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("bandit")


def test_the_mean_of_the_posterior_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mean(Random):
        def betavariate(self, alpha: float, beta: float) -> float:
            return alpha / (alpha + beta)

    monkeypatch.setattr(thompson, "Random", Mean)
    assert_rejected("bandit")


def test_one_rate_for_the_whole_draft_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(self: BanditBudget, sequence: Any) -> int:
        posterior, size = self.posterior, 1
        rate = posterior._random.betavariate(posterior.accepted + 1, posterior.rejected + 1)
        while size < self.max_size and posterior._random.random() < rate:
            size += 1
        return size

    monkeypatch.setattr(BanditBudget, "size", size)
    assert_rejected("bandit")


def test_counting_every_draft_after_the_first_rejection_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def observe(self: Posterior, num_accepted: int, num_drafts: int) -> None:
        if num_drafts:
            self.accepted = self.memory * self.accepted + num_accepted
            self.rejected = self.memory * self.rejected + num_drafts - num_accepted

    monkeypatch.setattr(Posterior, "observe", observe)
    assert_rejected("bandit")


def test_a_posterior_that_never_forgets_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = BanditBudget.__init__
    monkeypatch.setattr(
        BanditBudget, "__init__", lambda self, *given: budget(self, *given[:-1], 1.0)
    )
    assert_rejected("bandit")


def test_an_exit_after_another_layer_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    read = early_exit.int_value

    def later(config: Any, key: str, *rest: Any, **more: Any) -> int:
        return read(config, key, *rest, **more) + (key == "exit_after")

    monkeypatch.setattr(early_exit, "int_value", later)
    assert_rejected("bandit")


def test_an_exit_without_the_trained_layer_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*given: Any) -> Any:
        layer = read_dense_layer(*given)
        for linear in (layer.output, layer.mlp.down):
            linear.weight.data = np.zeros_like(linear.weight.data)
        return layer

    monkeypatch.setattr(early_exit, "read_dense_layer", without)
    assert_rejected("bandit")


def test_copies_in_place_of_the_draft_model_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelOrCopies, "open", lambda self, sequence: self.copies.open(sequence))
    assert_rejected("bandit")


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 4.0])
def test_another_weight_of_the_confidence_is_rejected(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thompson, "CONFIDENCE_WEIGHT", weight)
    assert_rejected("bandit")


@CONDITIONS
@pytest.mark.parametrize("control", ["beta", "calibration"])
def test_the_text_is_that_of_plain_decoding(
    control: str, options: dict[str, Any], temperature: float
) -> None:
    decoder = f"bandit:control={control}"
    drafted = assert_text_of_plain_decoding(
        early_exit_checkpoint, (decoder, decoder), options, temperature=temperature
    )
    assert min(drafted) > 20


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ("bandit:control=calibration", "needs a draft model"),
        ("bandit:control=calibration,drafter=prompt-lookup", "leave drafter out"),
        ("bandit:control=gamma", "choose from beta"),
    ],
)
def test_refusals(decoder: str, message: str) -> None:
    with scripted(wordy()) as llm, pytest.raises(AnydecodeError, match=message):
        llm.generate("abc", decoder=decoder)


def fake_sequence(length: int = 0) -> Any:
    """What a budget reads of a sequence."""
    return SimpleNamespace(noise=SimpleNamespace(seed=1, stream=0), length=length)


def fake_round(num_accepted: int, num_drafts: int) -> Any:
    return SimpleNamespace(tree=[0] * num_drafts, num_accepted=num_accepted, draft_seconds=0.0)


@pytest.mark.parametrize(("accepted", "rejected", "size"), [(1e9, 0, 8), (0, 1e9, 1)])
def test_sure_rates_draft_all_or_one(accepted: float, rejected: float, size: int) -> None:
    budget = catalogue.build("bandit").budget(fake_sequence())
    budget.posterior.accepted, budget.posterior.rejected = accepted, rejected
    assert budget.size(fake_sequence()) == size


def test_lengths_have_the_mean_of_the_posterior() -> None:
    """With the prior, every draft is followed by another with probability 1/2."""
    budget = catalogue.build("bandit").budget(fake_sequence())
    sizes = [budget.size(fake_sequence(length)) for length in range(4000)]
    assert sum(sizes) / len(sizes) == pytest.approx(2 - 2**-7, abs=0.1)
    again = [budget.size(fake_sequence(3999)) for _ in range(8)]  # a round that starts again
    assert again == sizes[-1:] * 8


def test_counts_decay_and_a_round_has_one_rejection_at_most() -> None:
    budget = catalogue.build("bandit", memory=0.5).budget(fake_sequence())
    posterior = budget.posterior
    budget.observe(fake_round(2, 5))
    assert (posterior.accepted, posterior.rejected) == (2, 1)
    budget.observe(fake_round(3, 3))
    assert (posterior.accepted, posterior.rejected) == (0.5 * 2 + 3, 0.5)
    budget.observe(fake_round(0, 0))  # no drafts, nothing learnt
    assert (posterior.accepted, posterior.rejected) == (4, 0.5)
    budget.observe(fake_round(0, 1))
    assert (posterior.accepted, posterior.rejected) == (2, 1.25)


def test_rejections_shorten_the_drafts() -> None:
    sequence = fake_sequence()
    budget = catalogue.build("bandit").budget(sequence)
    sizes = []
    for num_accepted, num_drafts in ((8, 8), (0, 8)):
        for _ in range(60):
            budget.observe(fake_round(num_accepted, num_drafts))
        sizes.append(sum(budget.size(sequence) for _ in range(50)))
    assert sizes[0] > 3 * sizes[1]
