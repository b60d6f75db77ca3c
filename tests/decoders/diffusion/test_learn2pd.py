"""Learn2PD: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.diffusion.learn2pd import PredictedEnd
from certificates import assert_certified, assert_rejected, ignore_parameter


def test_certificate() -> None:
    assert_certified("learn2pd")


@pytest.mark.parametrize("parameter", ["filter", "threshold"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "learn2pd", parameter)
    assert_rejected("learn2pd")


def test_certificate_rejects_a_canvas_that_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PredictedEnd, "truncated_length", lambda self, canvas, predictions: None)
    assert_rejected("learn2pd")
