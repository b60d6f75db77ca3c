"""Bounded adaptive thresholds (bacd-tccf): its certificate, and mistakes that it rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.decoders.diffusion.canvas import Canvas
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("bacd-tccf")


@pytest.mark.parametrize("parameter", ["high", "coarse", "fine", "marker", "low"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "bacd-tccf", parameter)
    assert_rejected("bacd-tccf")


def test_certificate_rejects_rows_that_see_coarse_blocks_in_the_second_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visible = Canvas.visible

    def coarse(self: Canvas, positions: np.ndarray) -> np.ndarray:
        ends = visible(self, positions)
        if self.later_blocks is None:
            return ends
        return np.where(positions < self.later_blocks[0], ends, len(self)).astype(np.int32)

    monkeypatch.setattr(Canvas, "visible", coarse)
    assert_rejected("bacd-tccf")
