"""Momentum decoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.certification.checks import measures_of
from anydecode.certification.oracles.sampling.repetition import circular, repetition
from anydecode.sampling.momentum import Momentum
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("momentum")


def test_certificate_rejects_a_history_of_the_prompt_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Momentum, "advance", lambda self, token: None)
    assert_rejected("momentum")


def test_certificate_rejects_a_resistance_of_repeated_tokens_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    depth = Momentum.depth
    monkeypatch.setattr(Momentum, "depth", lambda self, token: min(1, depth(self, token)))
    assert_rejected("momentum")


def test_greedy_decoding_fails_its_measure() -> None:
    (measure,) = measures_of("momentum")
    assert repetition(circular(), 80) > measure.margin


@pytest.mark.parametrize("other", [{"alpha": 0.3}, {"k": 4}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "momentum", **other)
    assert_rejected("momentum")
