"""Oracle test of prepacking (arXiv:2404.09529): bins and passes, computed by hand."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.schedules.passes import passes, rows_of, same_text
from anydecode.engine.schedules.prepacking import pack


@oracle_test("prepacking")
def prepacking() -> Iterator[Check]:
    """Bins of 200: the request of 80 goes to the emptier of two bins with room, which is not the
    tightest fit."""
    lengths = [200, 120, 110, 80, 70]
    yield Check("bins by hand", pack(lengths, 200) == [[0], [1, 4], [2, 3]])
    rows = rows_of(passes("prepacking", lengths, tokens=2))
    expected = [{0: 200}, {0: 1, 1: 120, 4: 70}, {1: 1, 4: 1, 2: 110, 3: 80}, {2: 1, 3: 1}]
    yield Check("a bin is a pass, beside all decodes", rows == expected, str(rows))
    # Bins of 64 rows: 60, 50 + 14, 40 + 20, 30 + 30.
    rows = rows_of(passes("prepacking", [60, 50, 40, 30, 30, 20, 14], tokens=1))
    expected = [{0: 60}, {1: 50, 6: 14}, {2: 40, 5: 20}, {3: 30, 4: 30}]
    yield Check("short prompts are packed by default", rows == expected, str(rows))
    rows = rows_of(passes("prepacking", [60, 45, 20], tokens=1))
    yield Check("65 rows take two bins", rows == [{0: 60}, {1: 45}, {2: 20}], str(rows))
    yield same_text("prepacking")
