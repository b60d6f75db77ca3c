"""Fair shares of tenants: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from collections.abc import Hashable

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
