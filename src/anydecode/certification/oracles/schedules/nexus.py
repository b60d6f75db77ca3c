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
    # A pass without decodes has 100 rows.
    rows = rows_of(passes("nexus:row_budget=100,steps=10,beta=1.6", [5, 170, 150], tokens=12))
    first = [{0: 5, 2: 95}, *[{0: 1, 2: 20}] * 2, {0: 1, 2: 15, 1: 5}]
    yield Check("the shortest prompt first, in shares of 20", rows[:4] == first, str(rows))
    speaking = [one for one in rows if 0 in one]
    yield Check("a decoding request is in every pass", rows[:12] == speaking)
    for ageing, request in ((0, 2), (1000, 1)):
        late = f"nexus:row_budget=20,steps=2,ageing={ageing}"
        rows = rows_of(passes(late, [5, 150, 70], tokens=1, running=2))
        yield Check(
            f"ageing {ageing}: {request} goes first", list(rows[1]) == [request], str(rows[1])
        )
    # 200 rows remain after the first pass, then 160: 32, 24, 24, 20 for 10 to 40, best 18 at 80.
    full = passes("nexus:row_budget=100,steps=10,beta=1,full=-1,alpha=1.2", [5, 295], tokens=3)
    counts = [one.get(1) for one in rows_of(full)][:3]
    yield Check("a full cache gives decodes priority", counts == [95, 40, 40], str(counts))
    yield same_text("nexus:row_budget=100,steps=10")
    yield from _default_checks()


def _default_checks() -> Iterator[Check]:
    """The default parameters: shares of 16, 32, ..., 512 rows; alpha and beta 1.3; a change of 5 %;
    a cache full at 70 %; an ageing of 16 rows per pass. With beta, n decode rows allow shares up to
    23.5 + 0.3 n. A pass without decodes has 512 rows."""

    def rows(lengths: list[int], schedule: str = "nexus", **options: Any) -> list[dict[int, int]]:
        return rows_of(passes(schedule, lengths, **{"tokens": 1, **options}))

    def shares(of: int, all_rows: list[dict[int, int]], count: int) -> list[int | None]:
        return [one.get(of) for one in all_rows[:count]]

    for decodes, share in ((29, 32), (28, 16)):
        found = shares(decodes, rows([5] * decodes + [800], tokens=12), 4)
        expected_shares = [512 - 5 * decodes, share, share, share]
        name = f"the default beta, {decodes} decodes"
        yield Check(name, found == expected_shares, str(found))
    actual = rows([600, 64], tokens=2)
    expected = [{0: 448, 1: 64}, {0: 16, 1: 1}, {0: 136}, {0: 1}]
    yield Check("the default row budget", actual == expected, str(actual))
    # With beta = 12, 5 decodes allow 346 rows, thus 336; 6 allow 357, thus 352, which is less than
    # 5 % more; 8 allow 379, thus 368, which is less than 10 % more. The last three requests arrive
    # when 5 and 6 requests decode.
    arrivals = [0] * 6 + [1, 2, 2]
    actual = rows([3000, *[2] * 8], "nexus:beta=12", tokens=20, arrivals=arrivals)
    totals = [sum(one.values()) for one in actual[:4]]
    yield Check("the default change", totals == [512, 336 + 5, 336 + 6, 368 + 8], str(totals))
    # After the first pass, 512 of 1000 positions are in use; 12 passes later 512 + 17 * 12, and 98
    # rows remain. One pass takes 12.2, two take 14.8, four take 16.8. The last 34 rows take 5.8 in
    # one pass, 7.8 in three.
    found = shares(1, rows([2, 800], tokens=60, cache_positions=1000), 16)
    expected_shares = [510, *[16] * 12, 64, 34, 1]
    yield Check("the default alpha and full", found == expected_shares, str(found))
    # When request 3 arrives, 366 rows of request 2 remain, which has waited for 3 passes.
    for length, first in ((366 - 3 * 16 - 1, 3), (366 - 3 * 16 + 1, 2)):
        late = rows([5, 5, 900, length], running=3, max_tokens=[60, 3, 1, 1])[3]
        yield Check(f"the default ageing, {length} rows", late == {0: 1, first: 16}, str(late))
