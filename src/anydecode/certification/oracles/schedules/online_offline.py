"""Oracle test of online-offline (ConServe, arXiv:2410.01228): the passes of an online and an
offline request, computed by hand."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.schedules.passes import passes, rows_of, same_text


@oracle_test("online-offline")
def online_offline() -> Iterator[Check]:
    """Budget 100; offline requests get what online requests leave, and at most 30 rows."""
    schedule = "online-offline:row_budget=100,offline=30"
    rows = rows_of(passes(schedule, [75, 90], tokens=2, priority=[1, 0]))
    expected = [{1: 90, 0: 10}, {1: 1, 0: 30}, {0: 30}, {0: 5}, {0: 1}]
    yield Check("offline requests fill what online requests leave", rows == expected, str(rows))
    yield same_text("online-offline")
