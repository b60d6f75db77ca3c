"""DySpec: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from certificates import assert_certified, assert_rejected, replace_method


def test_certificate() -> None:
    assert_certified("dyspec")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "dyspec", "speculative-sampling")
    assert_rejected("dyspec")
