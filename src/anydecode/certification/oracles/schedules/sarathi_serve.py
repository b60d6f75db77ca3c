"""Oracle test of sarathi-serve (Sarathi-Serve, arXiv:2403.02310): the passes of several prompts,
computed by hand, and the bounds on every pass."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.schedules.passes import passes, rows_of, same_text


def stretch(rows: dict[int, int]) -> float:
    """The time of a pass, at default costs, divided by that of its decode rows (one per request)
    alone."""
    decodes = sum(count == 1 for count in rows.values())
    return (0.9 + 0.1 * sum(rows.values())) / (0.9 + 0.1 * decodes)


@oracle_test("sarathi-serve")
def sarathi_serve() -> Iterator[Check]:
    """The same prompts: what one prompt leaves of the budget is given to the next."""
    rows = rows_of(passes("sarathi-serve:budget=100", [230, 150], tokens=4))
    expected = [
        {0: 100}, {0: 100}, {0: 30, 1: 70}, {0: 1, 1: 80}, {0: 1, 1: 1}, {0: 1, 1: 1}, {1: 1},
    ]  # fmt: skip
    yield Check("decodes first, then started prompts, then new ones", rows == expected, str(rows))
    rows = rows_of(passes("sarathi-serve:budget=80", [70, 70, 70], tokens=30))
    yield Check("no pass exceeds the budget", all(sum(one.values()) <= 80 for one in rows))
    began = next(i for i, one in enumerate(rows) if 0 in one and one[0] == 1)
    yield Check("a decoding request is in every pass", all(0 in one for one in rows[began:][:29]))
    rows = rows_of(passes("sarathi-serve:stretch=2.45", [2, 8, 600, 3], tokens=60))
    stretches = [stretch(one) for one in rows if 1 in one.values()]
    yield Check("short prompts too keep within the stretch", max(stretches) <= 2.45, str(stretches))
    yield Check("a pass without decodes uses the whole budget", rows[0] == {0: 2, 1: 8, 2: 502})
    # By default a factor of 2: 10 rows beside two decodes (in floating point, 0.9 + 13 / 10 is more
    # than 2.2). Without decodes, a pass has 512 rows.
    rows = rows_of(passes("sarathi-serve", [2, 8, 530, 15], tokens=60))
    expected = [{0: 2, 1: 8, 2: 502}, *[{0: 1, 1: 1, 2: 10}] * 2, {0: 1, 1: 1, 2: 8, 3: 2}]
    yield Check("by default twice the time of the decodes", rows[:4] == expected, str(rows[:6]))
    rows = rows_of(passes("sarathi-serve:budget=16", [2, 30, 8], tokens=9))
    expected = [{0: 2, 1: 14}, {0: 1, 1: 15}, {0: 1, 1: 1, 2: 8}]
    yield Check("short prompts count against the budget", rows[:3] == expected, str(rows))
    yield same_text("sarathi-serve:budget=70")
