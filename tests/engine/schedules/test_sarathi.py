"""SARATHI: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anydecode import catalogue
from anydecode.engine.schedule import DecodesFirst
from anydecode.engine.schedules import chunked
from anydecode.engine.schedules.sarathi import Sarathi
from anydecode.scoring.score import ScoreRequest
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("sarathi")


def test_certificate_rejects_chunks_of_several_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sarathi, "schedule", DecodesFirst(100).schedule)
    assert_rejected("sarathi")


def test_certificate_rejects_chunks_regardless_of_the_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "rows_beside", lambda *given, **how: 512)
    assert_rejected("sarathi")


def test_certificate_rejects_short_prompts_beyond_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_prompt(self: Sarathi, request: ScoreRequest) -> bool:
        by_cost = self.budget is None and chunked.is_prompt(request)
        return request.num_rows > self.short or by_cost

    monkeypatch.setattr(Sarathi, "_is_prompt", is_prompt)
    assert_rejected("sarathi")


def request(num_rows: int) -> Any:
    """A request that has not begun, with one span."""
    span = SimpleNamespace(remaining=num_rows, divisible=True, done=0, is_partial=False)
    return SimpleNamespace(num_rows=num_rows, groups=[[span]], sequence=None)


@pytest.mark.parametrize("key", ["sarathi", "sarathi-serve"])
@pytest.mark.parametrize(
    ("decodes", "expected"),
    [
        (1, [(2, 1), (0, 3)]),
        (3, [(2, 1), (3, 1), (4, 1), (0, 1)]),
        (4, [(2, 1), (3, 1), (4, 1), (5, 1)]),  # nothing is left
        (5, [(2, 1), (3, 1), (4, 1), (5, 1), (6, 1)]),  # decodes never wait
    ],
)
def test_prompts_get_what_decodes_leave_of_the_budget(
    key: str, decodes: int, expected: list[tuple[int, int]]
) -> None:
    schedule = catalogue.build(key, budget=4, short=2)
    waiting = [request(9), request(9), *(request(1) for _ in range(decodes))]
    number = {id(one): index for index, one in enumerate(waiting)}
    found = [(number[id(one)], rows) for one, _, rows in schedule.schedule(waiting)]
    assert found == expected
