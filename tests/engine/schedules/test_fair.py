"""Fair shares of tenants: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from anydecode.engine.schedules.fair import Fair
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected, replace_class_default

submitted = Fair.submitted


def test_certificate() -> None:
    assert_certified("fair")


def test_certificate_rejects_admission_by_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fair, "next_job", lambda self, waiting: 0)
    assert_rejected("fair")


def test_certificate_rejects_credit_for_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_lift(self: Fair, sequence: Sequence, waiting: Iterable[Sequence]) -> None:
        self.served.setdefault(sequence.namespace, 0.0)

    monkeypatch.setattr(Fair, "submitted", without_lift)
    assert_rejected("fair")


def test_certificate_rejects_credit_where_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_last(self: Fair, sequence: Sequence, waiting: Iterable[Sequence]) -> None:
        self._last_admitted = None
        submitted(self, sequence, waiting)

    monkeypatch.setattr(Fair, "submitted", without_last)
    assert_rejected("fair")


def test_certificate_rejects_a_lift_to_the_counters_at_admission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenant that waits long would lose what the others are served in the meantime."""
    new: list[tuple[Sequence, list[Sequence]]] = []
    next_job = Fair.next_job

    def late(self: Fair, sequence: Sequence, waiting: Iterable[Sequence]) -> None:
        new.append((sequence, list(waiting)))

    def lift_first(self: Fair, waiting: list[Sequence]) -> int:
        for sequence, others in new:
            submitted(self, sequence, others)
        new.clear()
        return next_job(self, waiting)

    monkeypatch.setattr(Fair, "submitted", late)
    monkeypatch.setattr(Fair, "next_job", lift_first)
    assert_rejected("fair")


@pytest.mark.parametrize(
    ("parameter", "value"), [("prompt", 0.0), ("prompt", 0.9), ("output", 0.0), ("output", 2.1)]
)
def test_certificate_rejects_other_weights(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, Fair, parameter, value)
    assert_rejected("fair")


def sequence(tenant: str, number: int) -> Any:
    return SimpleNamespace(namespace=tenant, id=number, prompt=[0], tokens=[], finished=False)


def test_the_last_tokens_of_a_request_are_charged() -> None:
    schedule, one = Fair(), sequence("a", 1)
    schedule.submitted(one, [])
    schedule.admitted(one)
    one.tokens, one.finished = [0, 0, 0], True
    schedule.submitted(sequence("b", 2), [])
    assert schedule.served["a"] == 7.0
