"""Online speculative decoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.speculative.online_sd import OnlineDrafter
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("online-sd")


def test_certificate_rejects_a_drafter_that_is_never_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OnlineDrafter, "train", lambda self: None)
    assert_rejected("online-sd")


def test_certificate_rejects_a_correction_that_is_never_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OnlineDrafter, "clear", lambda self: None)
    assert_rejected("online-sd")
