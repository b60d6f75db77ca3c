"""Oracle test of fair (virtual token counter, arXiv:2401.00588): the order of admission of two
tenants, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.schedules.passes import passes, rows_of, same_text
from anydecode.engine.schedules.fair import Fair


@oracle_test("fair")
def fair() -> Iterator[Check]:
    """One running request, and 10 + 2 * 5 = 20 units per request: many requests of one tenant do
    not delay those of another."""
    tenants = ["a", "a", "a", "a", "b", "b"]
    rows = rows_of(passes("fair", [10] * 6, tokens=5, running=1, namespace=tenants))
    order = list(dict.fromkeys(request for one in rows for request in one))
    yield Check("the tenant served least is next", order == [0, 4, 1, 5, 2, 3], str(order))
    schedule = Fair()
    schedule.served = {"a": 40.0, "b": 90.0}
    waiting: Any = [SimpleNamespace(namespace=name, tokens=[], finished=False) for name in "abc"]
    schedule.next_job(waiting[:2])
    schedule.next_job(waiting)
    yield Check("a late tenant gets no credit for idle time", schedule.served["c"] == 40.0)
    yield same_text("fair")
