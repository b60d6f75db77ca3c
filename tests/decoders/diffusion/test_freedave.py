"""FreeDave: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.chains import ChainDenoiser
from anydecode.decoders.diffusion.predictions import Predictions
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("freedave")


@pytest.mark.parametrize("parameter", ["block"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "freedave", parameter)
    assert_rejected("freedave")


def test_certificate_rejects_drafts_that_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_drafts(
        self: ChainDenoiser,
        canvas: Canvas,
        predictions: list[Predictions],
        chain: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
    ) -> int:
        return min(len(chain), len(predictions))

    monkeypatch.setattr(ChainDenoiser, "_reached", all_drafts)
    assert_rejected("freedave")
