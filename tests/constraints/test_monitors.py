"""Monitored names: their certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.constraints import monitors
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("monitors")


def test_certificate_rejects_free_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        monitors._TokenSets, "name_tokens", lambda self, suffixes: self.free_tokens.copy()
    )
    assert_rejected("monitors")


def test_certificate_rejects_names_that_may_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "_ends_name", lambda data: False)
    assert_rejected("monitors")
