"""EOSER and ascending steps (eoser-ass): its certificate, and mistakes that it rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.diffusion.eoser_ass import EarlyEosRejection
from anydecode.decoders.diffusion.rankings import Confidence
from certificates import assert_certified, assert_rejected, ignore_parameter


def test_certificate() -> None:
    assert_certified("eoser-ass")


@pytest.mark.parametrize("parameter", ["blocks"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "eoser-ass", parameter)
    assert_rejected("eoser-ass")


def test_certificate_rejects_an_early_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EarlyEosRejection, "rank", Confidence.rank)
    assert_rejected("eoser-ass")
