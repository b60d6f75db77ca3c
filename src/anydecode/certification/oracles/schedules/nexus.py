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
    yield from _default_checks()


def _default_checks() -> Iterator[Check]:
    """The default parameters: shares of 16, 32, ..., 512 rows; alpha and beta 1.3; a change of 5 %;
    a cache full at 70 %; an ageing of 16 rows per pass; prompts of more than 64 rows. With beta, n
    decode rows allow shares up to 23.5 + 0.3 n."""

    def rows(lengths: list[int], *, tokens: int = 1, **options: Any) -> list[dict[int, int]]:
        return rows_of(passes("nexus", lengths, tokens=tokens, **options))

    def shares(of: int, all_rows: list[dict[int, int]], count: int) -> list[int | None]:
        return [one.get(of) for one in all_rows[:count]]

    found = shares(30, rows([5] * 30 + [400], tokens=12), 12)  # 150 decode rows, then 30
    yield Check("the default beta", found == [64, *[32] * 10, 16], str(found))
    actual = rows([600, 64], tokens=2)
    expected = [{0: 32, 1: 64}, {0: 16, 1: 1}, {0: 512}, {0: 40}, {0: 1}]
    yield Check("the default row budget", actual == expected, str(actual))
    actual = rows([65, 64], tokens=2)
    expected = [{0: 32, 1: 64}, {0: 16, 1: 1}, {0: 17}, {0: 1}]
    yield Check("65 rows are a prompt by default, 64 are not", actual == expected, str(actual))
    # 1080, 1116 and 1152 decode rows allow 336, 352 and 368; 352 is less than 5 % more than 336.
    found = shares(0, rows([1500, *[60] * 18, *[62] * 18, *[64] * 18], running=19), 3)
    yield Check("the default change", found == [336, 336, 368], str(found))
    # After 42 passes, 1 + 17 * 42 of 1000 positions are in use, and 128 rows remain: one pass takes
    # 13.8, four take 16.8, eight take 20.8. The last 32 rows take 4.2 or 5.2.
    found = shares(1, rows([2, 800], tokens=60, cache_positions=1000), 48)
    expected_shares = [*[16] * 42, 32, 32, 32, 16, 16, 1]
    yield Check("the default alpha and full", found == expected_shares, str(found))
    # When request 3 arrives, 252 rows of request 2 remain, which has waited for 3 passes.
    for length, first in ((252 - 3 * 16 - 1, 3), (252 - 3 * 16 + 1, 2)):
        late = rows([5, 5, 300, length], running=3, max_tokens=[60, 3, 1, 1])[3]
        yield Check(f"the default ageing, {length} rows", late == {0: 1, first: 16}, str(late))
