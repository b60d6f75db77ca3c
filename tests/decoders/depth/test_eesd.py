"""EESD passes its certificate; wrong posteriors and exits do not."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from anydecode.certification.rounds import scripted, wordy
from anydecode.certification.tiny import early_exit_checkpoint
from anydecode.decoders.depth import eesd
from anydecode.decoders.depth.exit_drafts import ExitSession
from anydecode.decoders.framework import thompson
from anydecode.decoders.framework.thompson import Posterior
from anydecode.errors import AnydecodeError
from certificates import (
    WRONG_RULES,
    assert_certified,
    assert_rejected,
    replace_defaults,
    replace_rejection_rule,
)
from drafted_texts import CONDITIONS, assert_text_of_plain_decoding


def test_certificate() -> None:
    assert_certified("eesd")


@pytest.mark.parametrize("defaults", [{"size": 7}, {"memory": 1.0}], ids=str)
def test_other_defaults_are_rejected(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "eesd", **defaults)
    assert_rejected("eesd")


def test_the_mean_of_the_posterior_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mean(Random):
        def betavariate(self, alpha: float, beta: float) -> float:
            return alpha / (alpha + beta)

    monkeypatch.setattr(thompson, "Random", Mean)
    assert_rejected("eesd")


def test_another_weight_of_the_confidence_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thompson, "CONFIDENCE_WEIGHT", 4.0)
    assert_rejected("eesd")


def test_the_confidence_in_the_most_probable_token_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def top(self: Any, token_share: float, top_share: float) -> bool:
        return bool(self.posterior.continues(top_share if self.is_calibrated else None))

    monkeypatch.setattr(eesd._Session, "continues", top)
    assert_rejected("eesd")


def test_counting_every_rejected_draft_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(self: Posterior, num_accepted: int, num_drafts: int) -> None:
        if num_drafts:
            self.accepted = self.memory * self.accepted + num_accepted
            self.rejected = self.memory * self.rejected + num_drafts - num_accepted

    monkeypatch.setattr(Posterior, "observe", observe)
    assert_rejected("eesd")


def test_a_layer_that_reads_rejected_drafts_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their positions stay in its cache, and the text goes on behind them."""

    def align(self: ExitSession, length: int) -> None:
        kv_cache = self.sequence.kv_cache("draft")
        kv_cache.skip(self.sequence.all_tokens[kv_cache.length : length])

    def observe(self: ExitSession, drafts: list[int], num_accepted: int, scores: Any) -> None:
        self._unread = scores.hidden[self.exit][:0].copy()

    monkeypatch.setattr(ExitSession, "_align", align)
    monkeypatch.setattr(ExitSession, "observe", observe)
    assert_rejected("eesd")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", WRONG_RULES)
def test_another_rejection_rule_is_rejected(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    replace_rejection_rule(monkeypatch, rule)
    assert_rejected("eesd")


@pytest.mark.one_in(2)
@CONDITIONS
@pytest.mark.parametrize("control", ["beta", "calibration"])
def test_the_text_is_that_of_plain_decoding(
    control: str, options: dict[str, Any], temperature: float
) -> None:
    decoder = f"eesd:control={control}"
    drafted = assert_text_of_plain_decoding(
        early_exit_checkpoint, (decoder, decoder), options, temperature=temperature
    )
    assert min(drafted) > 20


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ("eesd", "is an early exit of the model"),
        ("eesd:size=0", "size is 0; allowed are 1 to 1024"),
        ("eesd:memory=0", "0 < memory <= 1"),
        ("eesd:control=gamma", "choose from beta"),
    ],
)
def test_refusals(decoder: str, message: str) -> None:
    with scripted(wordy(), wordy(1)) as llm, pytest.raises(AnydecodeError, match=message):
        llm.generate("abc", decoder=decoder)
