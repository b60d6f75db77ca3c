"""Online and offline requests: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import LLM
from anydecode.engine.schedule import DecodesFirst
from anydecode.engine.schedules import online_offline
from anydecode.engine.schedules.online_offline import OnlineOffline
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, replace_class_default


def test_certificate() -> None:
    assert_certified("online-offline")


def test_certificate_rejects_equal_treatment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnlineOffline, "schedule", DecodesFirst.schedule)
    assert_rejected("online-offline")


def test_certificate_rejects_offline_rows_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = OnlineOffline.__init__
    monkeypatch.setattr(
        OnlineOffline, "__init__", lambda self, **given: made(self, **{**given, "offline": None})
    )
    assert_rejected("online-offline")


def test_certificate_rejects_offline_rows_that_fill_online_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(online_offline, "rows_beside", lambda *given, **how: 512)
    assert_rejected("online-offline")


def test_certificate_rejects_offline_rows_beyond_the_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    within = online_offline.rows_within
    monkeypatch.setattr(online_offline, "rows_within", lambda *given: max(1, within(*given)))
    assert_rejected("online-offline")


@pytest.mark.parametrize("option", ["seconds=0", "seconds=-1", "offline=0", "stretch=1"])
def test_parameters_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(InvalidRequestError):
        LLM("tiny-autoregressive", schedule=f"online-offline:{option}")


def test_certificate_rejects_limited_passes_without_online_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = OnlineOffline._limit

    def limit(self: OnlineOffline, online: Any, offline: Any, left: int) -> int:
        return allowed(self, online, offline, left) if online else 9

    monkeypatch.setattr(OnlineOffline, "_limit", limit)
    assert_rejected("online-offline")


@pytest.mark.parametrize(
    ("parameter", "value"), [("stretch", 1.9), ("stretch", 2.2), ("row_budget", 511)]
)
def test_certificate_rejects_another_default(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, OnlineOffline, parameter, value)
    assert_rejected("online-offline")
