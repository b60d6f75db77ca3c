"""EOSER and ascending steps (eoser-ass): its certificate, and mistakes that it rejects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.eoser_ass import EarlyEosRejection
from anydecode.decoders.diffusion.rankings import Confidence
from certificates import assert_certified, assert_rejected, ignore_parameter, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("eoser-ass")


@pytest.mark.parametrize("parameter", ["blocks", "schedule", "steps"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "eoser-ass", parameter)
    assert_rejected("eoser-ass")


@pytest.mark.parametrize(
    "defaults",
    [{"min_factor": 0.0}, {"min_factor": 0.012}, {"min_factor": 0.4}, {"blocks": 2}],
)
def test_certificate_rejects_other_defaults(
    defaults: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "eoser-ass", **defaults)
    assert_rejected("eoser-ass")


@pytest.mark.parametrize("factor", [0.0, 0.02])
def test_certificate_rejects_another_factor_of_the_ascending_schedule(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anydecode.decoders.diffusion.eoser_ass.ASCENDING_FACTOR", factor)
    assert_rejected("eoser-ass")


def test_certificate_rejects_an_early_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EarlyEosRejection, "rank", Confidence.rank)
    assert_rejected("eoser-ass")


@pytest.mark.parametrize(
    ("ascending", "factors"),
    [
        # One of three masks per step: none, one half and all of what comes before the last mask.
        (False, [0.4, 0.7, 1.0]),
        # One step: (2^1 - 1) / 2^1 of the way, and then no more than the whole way.
        (True, [0.7, 1.0, 1.0]),
    ],
)
def test_the_factor_grows_to_1_at_the_last_step(ascending: bool, factors: list[float]) -> None:
    canvas = Canvas(np.array([5, 6, 9, 9, 9]), mask=9)
    found: Any = SimpleNamespace(
        sequence=SimpleNamespace(stops_at=lambda token: token == 0),
        token=lambda position: 0 if position == 4 else 1,
        confidence=lambda positions: np.full(len(positions), 0.5),
    )
    ranking = EarlyEosRejection(0.4, ascending=ascending)
    for position, factor in zip((2, 3, 4), factors, strict=True):
        ranks = ranking.rank(canvas, found, canvas.masks)
        assert ranks == pytest.approx([0.5] * (len(canvas.masks) - 1) + [0.5 * factor])
        canvas.commit([position], [1], [0.5])
        canvas.step += 1
