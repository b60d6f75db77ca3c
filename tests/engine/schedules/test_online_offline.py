"""Online and offline requests: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.engine.schedule import DecodesFirst
from anydecode.engine.schedules.online_offline import OnlineOffline
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("online-offline")


def test_certificate_rejects_equal_treatment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnlineOffline, "schedule", DecodesFirst.schedule)
    assert_rejected("online-offline")


def test_certificate_rejects_offline_rows_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = OnlineOffline.__init__
    monkeypatch.setattr(
        OnlineOffline, "__init__", lambda self, **given: made(self, **{**given, "offline": 0})
    )
    assert_rejected("online-offline")
