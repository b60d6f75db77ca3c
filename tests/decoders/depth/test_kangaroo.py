"""Kangaroo passes its certificate; other thresholds, exits and layers that run twice do not."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from anydecode.certification.rounds import scripted, wordy
from anydecode.certification.tiny import early_exit_checkpoint
from anydecode.decoders.depth import kangaroo
from anydecode.decoders.depth.exit_drafts import ExitSession
from anydecode.errors import AnydecodeError
from anydecode.models import early_exit
from anydecode.models.dense_layer import read_attention
from anydecode.scoring.score import ScoreRequest
from anydecode.scoring.sequence import Sequence
from certificates import (
    WRONG_RULES,
    assert_certified,
    assert_rejected,
    replace_defaults,
    replace_rejection_rule,
)
from drafted_texts import (
    CONDITIONS,
    assert_constrained_text_of_plain_decoding,
    assert_text_of_plain_decoding,
)

ADAPTER = partial(early_exit_checkpoint, has_mlp=False)


def test_certificate() -> None:
    assert_certified("kangaroo")


@pytest.mark.parametrize("defaults", [{"size": 5}, {"threshold": 0.4}], ids=str)
def test_other_defaults_are_rejected(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "kangaroo", **defaults)
    assert_rejected("kangaroo")


def test_the_probability_of_the_draft_as_confidence_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sampled(self: Any, token_share: float, top_share: float) -> bool:
        return token_share >= self.threshold

    monkeypatch.setattr(kangaroo._Session, "continues", sampled)
    assert_rejected("kangaroo")


def test_an_exit_after_another_layer_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    read = early_exit.int_value

    def later(config: Any, key: str, *rest: Any, **more: Any) -> int:
        return read(config, key, *rest, **more) + (key == "exit_after")

    monkeypatch.setattr(early_exit, "int_value", later)
    assert_rejected("kangaroo")


def test_drafts_without_the_adapter_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*given: Any) -> Any:
        layer = read_attention(*given)
        layer.output.weight.data = np.zeros_like(layer.output.weight.data)
        return layer

    monkeypatch.setattr(early_exit, "read_attention", without)
    assert_rejected("kangaroo")


def test_an_adapter_that_misses_the_last_accepted_draft_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observe = ExitSession.observe

    def forgetting(self: Any, *given: Any) -> None:
        observe(self, *given)
        self._unread = self._unread[:0]

    monkeypatch.setattr(ExitSession, "observe", forgetting)
    assert_rejected("kangaroo")


def test_layers_that_run_twice_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(self: Any, drafts: list[int]) -> ScoreRequest:
        sequence: Sequence = self.sequence
        drafted = sequence.kv_cache().tokens[sequence.length - 1 :]
        sequence.truncate(sequence.length - 1)
        return sequence.score([*drafted, *drafts[-1:]], rows="all", hidden=(self.exit,))

    monkeypatch.setattr(ExitSession, "verification", again)
    assert_rejected("kangaroo")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", WRONG_RULES)
def test_another_rejection_rule_is_rejected(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    replace_rejection_rule(monkeypatch, rule)
    assert_rejected("kangaroo")


@CONDITIONS
def test_the_text_is_that_of_plain_decoding(options: dict[str, Any], temperature: float) -> None:
    decoders = "kangaroo:threshold=0", "kangaroo:threshold=0.3"
    drafted = assert_text_of_plain_decoding(ADAPTER, decoders, options, temperature=temperature)
    assert min(drafted) > 20


def test_constrained_texts_are_those_of_plain_decoding() -> None:
    """A head for a part of the tokens may have none that is allowed: then nothing is drafted."""
    assert_constrained_text_of_plain_decoding(ADAPTER, "kangaroo", temperature=0.8)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ("kangaroo", "is an early exit of the model"),
        ("kangaroo:size=0", "size is 0; allowed are 1 to 1024"),
        ("kangaroo:threshold=2", "0 <= threshold <= 1"),
    ],
)
def test_refusals(decoder: str, message: str) -> None:
    with (
        scripted(wordy(), wordy(1)) as llm,
        pytest.raises(AnydecodeError, match=message) as refused,
    ):
        llm.generate("abc", decoder=decoder)
    assert "\n" not in str(refused.value)
