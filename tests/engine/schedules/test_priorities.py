"""Priorities, offline work and fair shares, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anydecode import catalogue
from anydecode.errors import InvalidRequestError


def request(num_rows: int, priority: int = 0) -> Any:
    span = SimpleNamespace(remaining=num_rows, divisible=True)
    sequence = SimpleNamespace(priority=priority, root=SimpleNamespace(tokens=[0]))
    return SimpleNamespace(num_rows=num_rows, groups=[[span]], sequence=sequence)


def scheduled(schedule: Any, *waiting: Any) -> list[tuple[int, int]]:
    """(index of the request, rows) of the next pass."""
    return [(waiting.index(one), rows) for one, _, rows in schedule.schedule(list(waiting))]


def test_the_most_urgent_runs_and_the_least_urgent_is_preempted() -> None:
    schedule = catalogue.build("priority")
    sequences = [SimpleNamespace(priority=priority) for priority in (3, -1, 5, -1, 5)]
    assert schedule.next_job(sequences) == 1  # the first of equals
    assert schedule.victim(sequences) == 4  # the last of equals


@pytest.mark.parametrize(("offline", "rows"), [(3, 3), (5, 5), (9, 5)])
def test_offline_requests_get_the_rows_that_are_left(offline: int, rows: int) -> None:
    schedule = catalogue.build("online-offline", row_budget=10, short=4, offline=offline)
    waiting = (request(50, priority=1), request(2), request(1), request(2, priority=-1))
    assert scheduled(schedule, *waiting) == [(3, 2), (1, 2), (2, 1), (0, rows)]


def test_offline_requests_wait_if_nothing_is_left() -> None:
    schedule = catalogue.build("online-offline", row_budget=10, short=4, offline=10)
    assert scheduled(schedule, request(1, priority=1), request(10)) == [(1, 10)]
    short_first = (request(9, priority=1), request(2, priority=7), request(3, priority=2))
    assert scheduled(schedule, *short_first) == [(2, 3), (1, 2), (0, 5)]


def test_offline_rows_that_leave_nothing_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="offline is 0"):
        catalogue.build("online-offline", offline=0)
    with pytest.raises(InvalidRequestError, match="more than 1"):
        catalogue.build("online-offline", stretch=1.0)


def sequence(tenant: str, number: int, prompt: int) -> Any:
    return SimpleNamespace(
        namespace=tenant, id=number, prompt=[0] * prompt, tokens=[], finished=False
    )


def test_the_tenant_with_the_least_service_is_next() -> None:
    schedule = catalogue.build("fair", prompt=1.0, output=2.0)
    first, second, other = sequence("a", 1, 10), sequence("a", 2, 10), sequence("b", 3, 13)
    for number, one in enumerate(arrived := [first, second, other]):
        schedule.submitted(one, arrived[:number])
    assert schedule.next_job([first, second, other]) == 0
    schedule.admitted(first)  # a: 10
    assert schedule.next_job([second, other]) == 1
    schedule.admitted(other)  # b: 13
    assert schedule.next_job([second, sequence("b", 4, 1)]) == 0
    first.tokens = [0, 0]  # a: 10 + 2 * 2
    assert schedule.next_job([second, sequence("b", 4, 1)]) == 1
    assert schedule.served == {"a": 14.0, "b": 13.0}
    schedule.admitted(first)  # again, after preemption: its prompt is not charged twice
    assert schedule.served["a"] == 14.0


def test_idling_earns_no_credit() -> None:
    schedule = catalogue.build("fair")
    busy, waiting, newcomer = sequence("a", 1, 100), sequence("a", 2, 5), sequence("b", 3, 5)
    schedule.submitted(busy, [])
    schedule.admitted(busy)  # a: 100
    schedule.submitted(waiting, [])
    schedule.submitted(newcomer, [waiting])
    assert schedule.served["b"] == 100.0
    assert schedule.next_job([waiting, newcomer]) == 0  # equal: the first
