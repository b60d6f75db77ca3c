"""The default schedule and the row budget, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anydecode.engine.schedule import DecodesFirst, RowBudget
from anydecode.errors import InvalidRequestError


def request(num_rows: int, priority: int = 0, divisible: bool = True) -> Any:
    """A waiting request with one span."""
    span = SimpleNamespace(remaining=num_rows, divisible=divisible)
    sequence = SimpleNamespace(priority=priority)
    return SimpleNamespace(num_rows=num_rows, groups=[[span]], sequence=sequence)


def scheduled(schedule: DecodesFirst, *waiting: Any) -> list[tuple[int, int]]:
    """(index of the request, rows) of the next pass."""
    return [(waiting.index(one), rows) for one, _, rows in schedule.schedule(list(waiting))]


def test_requests_up_to_the_bound_run_before_prompts() -> None:
    schedule = DecodesFirst(row_budget=20, short=4)
    assert scheduled(schedule, request(5), request(4), request(30), request(1)) == [
        (1, 4),
        (3, 1),
        (0, 5),
        (2, 10),
    ]


def test_priorities_order_requests_of_one_kind() -> None:
    schedule = DecodesFirst(row_budget=20, short=4)
    waiting = (request(5, priority=1), request(5, priority=-1), request(1, priority=9))
    assert [index for index, _ in scheduled(schedule, *waiting)] == [2, 1, 0]


def test_an_indivisible_span_runs_whole_or_waits() -> None:
    schedule = DecodesFirst(row_budget=8, short=100)
    assert scheduled(schedule, request(8, divisible=False)) == [(0, 8)]
    assert scheduled(schedule, request(9, divisible=False)) == [(0, 9)]  # alone it must run
    assert scheduled(schedule, request(1), request(8, divisible=False), request(3)) == [
        (0, 1),
        (2, 3),
    ]


def test_a_budget_needs_a_row() -> None:
    assert RowBudget(1).left == 1
    with pytest.raises(InvalidRequestError, match="the row budget is 0"):
        RowBudget(0)
