"""Oracle test of layered-prefill (arXiv:2510.08055): groups of layers, cohorts and passes, computed
by hand."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.schedules.passes import passes, same_text
from anydecode.engine.schedules.layered_prefill import boundaries, num_groups


@oracle_test("layered-prefill")
def layered_prefill() -> Iterator[Check]:
    """A prompt of 180 tokens in four groups of one layer, beside a decoding request."""
    table = {512: 1, 513: 2, 1024: 2, 1025: 4, 2048: 4, 2049: 8, 4096: 8, 4097: 16, 99999: 16}
    groups = {rows: num_groups(rows, 512, 16) for rows in table}
    yield Check("the number of groups is as published", groups == table, str(groups))
    yield Check("larger groups first", boundaries(5, 2) == [3, 5] and boundaries(4, 4)[0] == 1)
    actual = passes("layered-prefill:unit=50", [2, 180], tokens=6, layers=4, arrivals=[0, 1])
    expected = [{(0, 2, 0, 4)}, *({(0, 1, 0, 4), (1, 180, i, i + 1)} for i in range(4))]
    expected += [{(0, 1, 0, 4), (1, 1, 0, 4)}] + [{(1, 1, 0, 4)}] * 4
    yield Check("one layer group per pass, beside all decodes", actual == expected, str(actual))
    actual = passes("layered-prefill:unit=50", [40, 60, 50], tokens=1, layers=4)
    expected = [{(n, rows, i, i + 1) for n, rows in enumerate((40, 60, 50))} for i in range(4)]
    yield Check("short prompts share a cohort", actual == expected, str(actual))
    actual = passes("layered-prefill:unit=1000,cohort=100", [150, 70], tokens=2)
    expected = [{(0, 100, 0, 3)}, {(0, 50, 0, 3)}, {(0, 1, 0, 3), (1, 70, 0, 3)}, {(1, 1, 0, 3)}]
    yield Check("one cohort at a time, long prompts in chunks", actual == expected, str(actual))
    # 14 rows through all layers beside one decode: 56 rows through one of four, three times.
    actual = passes("layered-prefill:stretch=2.45", [2, 168], tokens=20, layers=4)
    counts = [[count for request, count, _, _ in one if request == 1] for one in actual[1:]]
    yield Check(
        "a cohort sized by the cost of passes", counts[:13] == [[56]] * 12 + [[1]], str(counts)
    )
    # By default a factor of 2, thus 9 rows through all layers beside one decode (in floating point,
    # 0.9 + 11 / 10 is more than 2), and at most 16 groups: 9 * 16 rows through one or two layers.
    actual = passes("layered-prefill", [2, 400], tokens=60, layers=20)
    stops = [2, 4, 6, 8, *range(9, 21)]
    expected = [{(0, 2, 0, 20)}]
    for rows in (144, 144, 112):
        expected += [
            {(0, 1, 0, 20), (1, rows, first, stop)}
            for first, stop in zip([0, *stops], stops, strict=False)
        ]
    expected += [{(0, 1, 0, 20), (1, 1, 0, 20)}]
    yield Check("the default stretch and groups", actual[:50] == expected, str(actual[:50]))
    yield same_text("layered-prefill:unit=64,cohort=300")
