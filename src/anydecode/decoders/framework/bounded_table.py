"""A table of what a drafter has learned from earlier texts, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")

#: Default memory of what a drafter learns from earlier texts, in bytes.
DEFAULT_MEMORY = 64 << 20


class BoundedTable(OrderedDict[K, V]):
    """A dictionary that drops the entry that was stored longest ago whenever its memory is full.

    Args:
        memory: Maximum estimated memory, in bytes.
        entry_bytes: Estimated memory of an entry, in bytes.
    """

    def __init__(self, memory: int, entry_bytes: int) -> None:
        super().__init__()
        self.entry_bytes = entry_bytes
        self.max_entries = memory // entry_bytes

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.max_entries:
            self.popitem(last=False)

    def __reduce__(self) -> Any:
        sizes = self.max_entries * self.entry_bytes, self.entry_bytes
        return type(self), sizes, None, None, iter(self.items())

    @property
    def num_bytes(self) -> int:
        """The estimated memory, in bytes."""
        return self.entry_bytes * len(self)
