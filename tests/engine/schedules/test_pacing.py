"""How many prompt rows run beside decodes, by hand, for given costs of a pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anydecode.engine.schedules.pacing import MAX_PROMPT_ROWS, rows_beside


def requests(*num_rows: int, length: int = 0, seconds: Any = None) -> list[Any]:
    """Requests of so many rows after `length` cached positions. `seconds` is the cost model of
    their sequence."""
    cost_model = None if seconds is None else SimpleNamespace(seconds=seconds)
    span = SimpleNamespace(kv_cache=SimpleNamespace(length=length))
    return [
        SimpleNamespace(
            num_rows=count, groups=[[span]], sequence=SimpleNamespace(cost_model=cost_model)
        )
        for count in num_rows
    ]


def by_row(rows: int, context: int) -> float:
    return float(rows)


@pytest.mark.parametrize(("stretch", "expected"), [(2.0, 3), (1.5, 1), (4.0, 9), (1.1, 1)])
def test_a_pass_takes_at_most_so_many_times_as_long(stretch: float, expected: int) -> None:
    """Three decodes take 3; with 3 prompt rows, a pass takes exactly twice as long. One prompt row
    runs in any case."""
    prompts = requests(100, seconds=by_row)
    assert rows_beside(requests(1, 1, 1), prompts, stretch) == expected


def test_the_costs_are_those_of_the_prompts_sequence() -> None:
    """Where the first 8 rows are free, the pass is filled up to them and doubled."""
    prompts = requests(100, seconds=lambda rows, context: float(max(8, rows)))
    assert rows_beside(requests(1, 1), prompts, 2.0) == 16 - 2


def test_without_decodes_the_limit_is_that_of_a_pass() -> None:
    assert rows_beside([], requests(9999, seconds=by_row), 2.0) == MAX_PROMPT_ROWS
    free = requests(9999, seconds=lambda rows, context: 1.0)
    assert rows_beside(requests(1), free, 2.0) == MAX_PROMPT_ROWS


def test_for_whole_prompts_one_decode_at_their_end_is_assumed() -> None:
    """The prompt ends at 30 positions, which the decode attends to."""
    seen: list[tuple[int, int]] = []

    def seconds(rows: int, context: int) -> float:
        seen.append((rows, context))
        return float(rows)

    prompts = requests(20, length=10, seconds=seconds)
    assert rows_beside([], prompts, 3.0, whole=True) == 2
    assert seen[0] == (1, 30) and {context for _, context in seen} == {30}
