"""Fair shares of tenants: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import pytest

from anydecode.engine.schedules.fair import Fair
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("fair")


def test_certificate_rejects_admission_by_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fair, "next_job", lambda self, waiting: 0)
    assert_rejected("fair")


def test_certificate_rejects_credit_for_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def lift(self: Fair, tenant: Hashable) -> None:
        self.served.setdefault(tenant, 0.0)

    monkeypatch.setattr(Fair, "_lift", lift)
    assert_rejected("fair")


def test_certificate_rejects_free_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Fair, "admitted", lambda self, sequence: self.served.setdefault(sequence.namespace, 0.0)
    )
    assert_rejected("fair")


def test_a_tenant_that_returns_gets_no_credit_for_the_time_between() -> None:
    schedule = Fair()
    schedule.served = {"a": 0.0, "b": 50.0}
    a, b = (SimpleNamespace(namespace=name, tokens=[], finished=False) for name in "ab")
    waiting: list[Any]
    for waiting, expected in (([a, b], 0.0), ([b], 0.0), ([b, a], 50.0)):
        schedule.next_job(waiting)
        assert schedule.served == {"a": expected, "b": 50.0}
