"""P2: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.diffusion.p2 import PathPlanning
from anydecode.decoders.diffusion.rankings import Confidence
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("p2")


@pytest.mark.parametrize("parameter", ["steps", "block"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "p2", parameter)
    assert_rejected("p2")


def test_certificate_rejects_tokens_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only masks are planned, as in decoding without revision."""
    monkeypatch.setattr(
        PathPlanning, "free_positions", staticmethod(lambda canvas: canvas.masked(*canvas.block))
    )
    assert_rejected("p2")


def test_certificate_rejects_a_plan_that_keeps_the_least_sure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Confidence.rank
    monkeypatch.setattr(Confidence, "rank", lambda *given: -rank(*given))
    assert_rejected("p2")
