"""CreditDecoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.diffusion.creditdecoding import CreditDenoiser
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("creditdecoding")


@pytest.mark.parametrize("parameter", ["weight", "block"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "creditdecoding", parameter)
    assert_rejected("creditdecoding")


def test_certificate_rejects_credits_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    unmask_step = CreditDenoiser.unmask_step

    def forgetful(self: CreditDenoiser, sequence: Any, canvas: Any, predictions: Any) -> None:
        canvas.policy_state["credit"] = {}
        unmask_step(self, sequence, canvas, predictions)

    monkeypatch.setattr(CreditDenoiser, "unmask_step", forgetful)
    assert_rejected("creditdecoding")
