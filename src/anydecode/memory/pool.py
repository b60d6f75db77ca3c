"""The slots of one model's key-value cache, counted by reference.

A slot holds the key and value of one position in every layer. Because contexts map positions to
slots one by one, forking shares slots, keeping one path of a token tree is an edit of a table, and
nothing is ever copied or moved.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anydecode.errors import OutOfMemoryError, UnsupportedCombinationError
from anydecode.kernels.cache import bytes_per_position
from anydecode.kernels.interface import KeyValues
from anydecode.models.interface import Model

Slots = np.ndarray


class PoolFull(Exception):
    """Fewer slots are free than asked for; the engine preempts someone and tries again."""


def new_cache(model: Model, num_slots: int, format: str | None = None) -> KeyValues:
    """Keys and values of `num_slots` positions, in the format the model prefers where none is
    given. Raises UnsupportedCombinationError for a format that the model's backend cannot keep."""
    if format is None:
        return model.new_cache(num_slots)
    formats = getattr(model, "cache_formats", ())
    if format not in formats:
        raise UnsupportedCombinationError(
            f"{model.name} cannot keep a cache in {format!r}; it can in "
            + (", ".join(formats) or "its own format only")
        )
    make: Callable[..., KeyValues] = model.new_cache
    return make(num_slots, format)


class KVPool:
    """`num_slots` slots of `model`'s cache, kept in `format`. `reclaim(n)` is asked for slots
    before `PoolFull`."""

    def __init__(self, model: Model, num_slots: int, format: str | None = None) -> None:
        if num_slots < 1:
            raise OutOfMemoryError(f"a cache of {num_slots} positions cannot hold a sequence")
        self.model = model
        self.num_slots = num_slots
        self.cache = new_cache(model, num_slots, format)
        self.references = np.zeros(num_slots, np.int32)
        self._free = list(range(num_slots - 1, -1, -1))
        self.reclaim: Callable[[int], None] | None = None

    @property
    def num_bytes(self) -> int:
        """What the keys and values of all slots take when every slot is in use."""
        return bytes_per_position(self.cache) * self.num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def allocate(self, count: int) -> Slots:
        """`count` free slots, each with one reference. Raises `PoolFull`, taking none."""
        if count > len(self._free) and self.reclaim is not None:
            self.reclaim(count - len(self._free))
        if count > len(self._free):
            raise PoolFull(f"{count} slots asked for, {len(self._free)} free")
        if count == 0:
            return np.empty(0, np.int32)
        allocated = np.array(self._free[: -count - 1 : -1], np.int32)
        del self._free[-count:]
        self.references[allocated] = 1
        return allocated

    def add_reference(self, slots: Slots) -> None:
        """One more reference to each of `slots` (distinct; -1 is skipped)."""
        self.references[slots[slots >= 0]] += 1

    def free(self, slots: Slots) -> None:
        """One reference less to each of `slots` (distinct; -1 is skipped)."""
        slots = slots[slots >= 0]
        self.references[slots] -= 1
        freed = slots[self.references[slots] == 0]
        self._free.extend(freed[::-1].tolist())

    def check_integrity(self, tables: list[Slots]) -> None:
        """Raise AssertionError unless the references are exactly those of `holders`' tables."""
        expected = np.zeros(self.num_slots, np.int32)
        for slots in tables:
            table_slots = slots[slots >= 0]
            assert len(np.unique(table_slots)) == len(table_slots), "a table names a slot twice"
            expected[table_slots] += 1
        assert np.array_equal(expected, self.references), "references do not add up"
        free = np.array(self._free, np.int64)
        assert len(np.unique(free)) == len(free), "a slot is free twice"
        assert np.array_equal(np.sort(free), np.flatnonzero(expected == 0)), "free list is wrong"
