"""Oracle test of sarathi (SARATHI, arXiv:2308.16369): the passes of two prompts, computed by
hand."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.schedules.passes import passes, rows_of, same_text


@oracle_test("sarathi")
def sarathi() -> Iterator[Check]:
    """Budget 100; prompts of 230 and 150 tokens, four output tokens each."""
    rows = rows_of(passes("sarathi:budget=100", [230, 150], tokens=4))
    expected = [
        {0: 100}, {0: 100}, {0: 30}, {0: 1, 1: 99}, {0: 1, 1: 51}, {0: 1, 1: 1}, {1: 1}, {1: 1},
    ]  # fmt: skip
    yield Check("one chunk of one prompt beside all decodes", rows == expected, str(rows))
    # By the default costs, a pass over n rows takes 0.9 + n / 10: 14 rows lengthen one decode by a
    # factor of 2.4.
    rows = rows_of(passes("sarathi:stretch=2.45", [230, 40], tokens=4))
    expected = [{0: 230}, {0: 1, 1: 14}, {0: 1, 1: 14}, {0: 1, 1: 12}, {1: 1}, {1: 1}, {1: 1}]
    yield Check("a chunk sized by the cost of passes", rows == expected, str(rows))
    # By default a factor of 2: 9 rows beside one decode (in floating point, 0.9 + 11 / 10 is more
    # than 2), 10 beside two. Without decodes, a pass has 512 rows.
    rows = rows_of(passes("sarathi", [600, 25], tokens=4))
    expected = [
        {0: 512}, {0: 88}, {0: 1, 1: 9}, {0: 1, 1: 9}, {0: 1, 1: 7}, {1: 1}, {1: 1}, {1: 1},
    ]  # fmt: skip
    yield Check("by default twice the time of the decodes", rows == expected, str(rows))
    rows = rows_of(passes("sarathi", [2, 8, 60], tokens=30))
    expected = [{0: 2}, {0: 1, 1: 8}, *[{0: 1, 1: 1, 2: 10}] * 6, {0: 1, 1: 1, 2: 1}]
    yield Check("short prompts are chunked by default", rows[:9] == expected, str(rows))
    rows = rows_of(passes("sarathi:budget=16", [2, 30, 8], tokens=9))
    expected = [{0: 2}, {0: 1, 1: 15}, {0: 1, 1: 15}, {0: 1, 1: 1, 2: 8}]
    yield Check("short prompts are chunked with a budget too", rows[:4] == expected, str(rows))
    yield same_text("sarathi:budget=100")
