"""Scheduling by priority: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.engine.schedules import priority
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("priority")


def test_certificate_rejects_admission_by_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "most_urgent", lambda sequences: 0)
    assert_rejected("priority")


def test_certificate_rejects_preemption_of_the_first_of_equals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first(sequences: list) -> int:
        return max(range(len(sequences)), key=lambda i: (sequences[i].priority, -i))

    monkeypatch.setattr(priority, "least_urgent", first)
    assert_rejected("priority")
