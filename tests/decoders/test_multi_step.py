"""Multi-step decoding: its certificate, and a mistake that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.autoregressive import Autoregressive
from anydecode.decoders.multi_step import MultiStep
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("multi-step")


def test_certificate_rejects_one_token_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiStep, "decode", Autoregressive.decode)
    assert_rejected("multi-step")
