"""Self-infilling: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.constrained import self_infill
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("self-infill")


def test_certificate_rejects_a_model_that_is_always_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_infill, "max_probability", lambda row: 1.0)
    assert_rejected("self-infill")


def test_certificate_rejects_an_interruption_at_threshold_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_infill, "max_probability", lambda row: -1.0)
    assert_rejected("self-infill")
