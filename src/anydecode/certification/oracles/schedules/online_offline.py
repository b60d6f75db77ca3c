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
    # By the default costs, a pass over n rows takes 0.9 + n / 10. By default offline rows at most
    # double it: 8 + n rows beside n (in floating point, 8 + n + 1 exceed the double); and all rows
    # of a pass without online requests.
    rows = rows_of(passes("online-offline", [600, 8, 5], tokens=2, priority=[1, 0, 0]))
    expected = [{2: 5, 1: 8, 0: 21}, {2: 1, 1: 1, 0: 10}, {0: 512}, {0: 57}, {0: 1}]
    yield Check("by default online passes take twice the time at most", rows == expected, str(rows))
    # 3.05 * 1.3 is the time of 30.65 rows, 3.05 * 1.1 that of 24.55. Offline decodes count too,
    # before offline prompts.
    rows = rows_of(passes("online-offline:stretch=3.05", [3, 100, 2, 2], tokens=9,
                          priority=[1, 1, 0, 0]))  # fmt: skip
    expected = [{2: 2, 3: 2, 0: 3, 1: 23}, {2: 1, 3: 1, 0: 1, 1: 21}, {2: 1, 3: 1, 0: 1, 1: 21}]
    yield Check("offline decodes come first within the limit", rows[:3] == expected, str(rows))
    # 3.05 seconds are the time of 21.5 rows. Of the prompt of 30 online rows, the first pass takes
    # 3.9 seconds alone, so that the offline request waits; then it gets 20 rows beside one.
    rows = rows_of(passes("online-offline:seconds=3.05", [50, 30], tokens=3, priority=[1, 0]))
    expected = [{1: 30}, {1: 1, 0: 20}, {1: 1, 0: 20}, {0: 10}, {0: 1}, {0: 1}]
    yield Check("online passes take at most the given seconds", rows == expected, str(rows))
    yield same_text("online-offline")
