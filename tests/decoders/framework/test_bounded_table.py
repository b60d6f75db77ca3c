"""Tables of what drafters learn stay within their memory, entry by entry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anydecode.decoders.framework.bounded_table import BoundedTable


@given(st.integers(0, 8), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=60))
def test_the_entries_stored_last_are_kept(max_entries: int, stored: list[tuple[int, int]]) -> None:
    table: BoundedTable[int, int] = BoundedTable(10 * max_entries + 9, 10)
    last: list[tuple[int, int]] = []
    for key, value in stored:
        table[key] = value
        last = [*(one for one in last if one[0] != key), (key, value)]
        assert list(table.items()) == last[len(last) - min(len(last), max_entries) :]
        assert table.num_bytes == 10 * len(table)


def test_an_update_stores_every_entry() -> None:
    table: BoundedTable[int, str] = BoundedTable(20, 10)
    table.update({1: "a", 2: "b"})
    table.update([(1, "c"), (3, "d")])
    assert dict(table) == {1: "c", 3: "d"}
