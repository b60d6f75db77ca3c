"""Oracle test of nexus (Nexus, arXiv:2507.06608): the prompts' share of a pass and the order of
prompts, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.schedules.passes import passes, rows_of, same_text
from anydecode.engine.schedules.nexus import chosen_share


def _linear(rows: int) -> float:
    """The default cost of an unmeasured pass: one for the first row, and a tenth for each further
    row."""
    return 0.9 + 0.1 * rows


@oracle_test("nexus")
def nexus() -> Iterator[Check]:
    """Shares of 10 to 100 rows beside one decode. Time between tokens: 1 + n / 10, best 2. Prefill
    of 200 rows: ceil(200 / n) times that, best 22 at 100; 40, 30, 28, 25 for 10 to 40."""
    shares = list(range(10, 101, 10))
    options: dict[str, Any] = {"decodes": 1, "prompt": 200, "shares": shares}
    for slack, expected in ((1.0, 10), (1.6, 20), (2.6, 40), (9.0, 100)):
        found = chosen_share(_linear, decode_first=False, slack=slack, **options)
        yield Check(f"prefill first, beta {slack:g}", found == expected, str(found))
    for slack, expected in ((1.0, 100), (1.2, 40), (1.3, 30), (1.4, 20), (2.0, 10)):
        found = chosen_share(_linear, decode_first=True, slack=slack, **options)
        yield Check(f"decode first, alpha {slack:g}", found == expected, str(found))
    rows = rows_of(passes("nexus:row_budget=100,steps=10,beta=1.6", [5, 150, 70], tokens=12))
    first = [{0: 5, 2: 20}, *[{0: 1, 2: 20}] * 2, {0: 1, 2: 10, 1: 10}]
    yield Check("the shortest prompt first, in shares of 20", rows[:4] == first, str(rows))
    speaking = [one for one in rows if 0 in one]
    yield Check("a decoding request is in every pass", rows[:12] == speaking)
    for ageing, request in ((0, 2), (1000, 1)):
        late = f"nexus:row_budget=20,steps=2,ageing={ageing}"
        rows = rows_of(passes(late, [5, 150, 70], tokens=1, running=2))
        yield Check(
            f"ageing {ageing}: {request} goes first", list(rows[1]) == [request], str(rows[1])
        )
    full = passes("nexus:row_budget=100,steps=10,beta=1,full=-1,alpha=1.2", [5, 200], tokens=3)
    counts = [one.get(1) for one in rows_of(full)][:2]
    yield Check("a full cache gives decodes priority", counts == [40, 40], str(counts))
    yield same_text("nexus:row_budget=100,steps=10")
