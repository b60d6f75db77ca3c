"""CD4LM: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.diffusion.cd4lm import DelayedEndOfText
from anydecode.decoders.diffusion.rankings import Confidence
from certificates import assert_certified, assert_rejected, ignore_parameter


def test_certificate() -> None:
    assert_certified("cd4lm")


@pytest.mark.parametrize("parameter", ["threshold", "max_per_step", "block"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "cd4lm", parameter)
    assert_rejected("cd4lm")


def test_certificate_rejects_an_early_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DelayedEndOfText, "rank", Confidence.rank)
    assert_rejected("cd4lm")
