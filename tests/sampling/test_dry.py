"""The DRY penalty: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.certification.checks import measures_of
from anydecode.certification.oracles.sampling.repetition import circular, repetition
from anydecode.sampling import dry
from anydecode.sampling.candidates import Candidates
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("dry")


def test_certificate_rejects_a_penalty_on_the_prompt_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dry.Dry, "advance", lambda self, token: None)
    assert_rejected("dry")


def test_certificate_rejects_a_bonus(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dry.Dry.__init__

    def inverted(self: dry.Dry, multiplier: float, *rest: Any, **more: Any) -> None:
        made(self, -multiplier, *rest, **more)

    monkeypatch.setattr(dry.Dry, "__init__", inverted)
    assert_rejected("dry")


def test_certificate_rejects_matches_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry, "MAX_MATCH", 1)
    assert_rejected("dry")


def test_greedy_decoding_fails_its_measure() -> None:
    (measure,) = measures_of("dry")
    assert repetition(circular(), 120) > measure.margin


@pytest.mark.parametrize("length", [2, 63, 64, 65, 80])
def test_matches_beyond_64_tokens_count_like_64(length: int) -> None:
    """The last `length` tokens have occurred before, and then token 99 followed."""
    repeated = list(range(length))
    processor = dry.Dry(0.5, base=1.02, allowed=2, prompt=[*repeated, 99, *repeated])
    scores = processor.apply(Candidates(None, np.zeros(100, np.float32))).scores
    assert scores[99] == pytest.approx(-0.5 * 1.02 ** (min(length, 64) - 2))
    assert not scores[:99].any()


@pytest.mark.parametrize("other", [{"multiplier": 0.7}, {"base": 1.5}, {"allowed": 3}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "dry", **other)
    assert_rejected("dry")
