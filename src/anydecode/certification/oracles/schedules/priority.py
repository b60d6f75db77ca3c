"""Oracle test of priority: the order of admission and of preemption, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.schedules.passes import passes, rows_of, same_text
from anydecode.engine.schedules.priority import Priority


@oracle_test("priority")
def priority() -> Iterator[Check]:
    """One running request; the smallest number is admitted first, whatever the arrival order."""
    rows = rows_of(passes("priority", [5, 5, 5], tokens=2, running=1, priority=[5, -1, 3]))
    order = list(dict.fromkeys(request for one in rows for request in one))
    yield Check("admitted by priority", order == [1, 2, 0], str(order))
    sequences: Any = [SimpleNamespace(priority=number) for number in (0, 7, 7, 2)]
    yield Check(
        "the least urgent request, and of those the last, is preempted",
        Priority().victim(sequences) == 2,
    )
    yield same_text("priority")
