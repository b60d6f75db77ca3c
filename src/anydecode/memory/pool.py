"""A reference-counted allocator of the slots of one model's key-value cache.

A slot holds the key and value of one position in every layer. Sequences map each position to a slot
through a table, so forking a sequence shares its slots, and accepting one path of a token tree
edits a table. Keys and values are never copied or moved.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anydecode.errors import OutOfMemoryError, UnsupportedCombinationError
from anydecode.kernels.cache import bytes_per_position
from anydecode.kernels.interface import KeyValues
from anydecode.models.interface import Model

Slots = np.ndarray
#: Slots are int32.
_MAX_SLOTS = np.iinfo(np.int32).max


class PoolFull(Exception):
    """Fewer slots are free than requested. The engine preempts a request and retries."""


def new_cache(model: Model, num_slots: int, format: str | None = None) -> KeyValues:
    """Allocate the key-value cache of a model.

    Args:
        model: The model whose keys and values are stored.
        num_slots: The number of positions.
        format: The storage format; None means the model's preferred one.

    Raises:
        UnsupportedCombinationError: The model's backend does not support the format.
    """
    if format is None:
        return model.new_cache(num_slots)
    formats = getattr(model, "cache_formats", ())
    if format not in formats:
        raise UnsupportedCombinationError(
            f"{model.name} does not support cache format {format!r}; supported: "
            + (", ".join(formats) or "its own format only")
        )
    make: Callable[..., KeyValues] = model.new_cache
    return make(num_slots, format)


class KVPool:
    """Allocates the slots of one model's key-value cache and counts references to them.

    Args:
        model: The model whose keys and values are stored.
        num_slots: The number of slots, at least 1.
        format: The storage format; None means the model's preferred one.

    `reclaim(n)`, if set, is called to free `n` slots before `allocate` raises `PoolFull`.
    `references` is int32 `[num_slots]`. `max_used` is the largest number of slots in use at a time
    since it was last set.

    Raises:
        OutOfMemoryError: `num_slots` is less than 1, or more than the memory has room for.
        UnsupportedCombinationError: The model's backend does not support the format.
    """

    def __init__(self, model: Model, num_slots: int, format: str | None = None) -> None:
        if type(num_slots) is not int or num_slots < 1:
            raise OutOfMemoryError(f"a cache of {num_slots!r} positions cannot hold a sequence")
        self.model = model
        self.num_slots = num_slots
        try:
            if num_slots > _MAX_SLOTS:
                raise MemoryError
            self.references = np.zeros(num_slots, np.int32)
            self.cache = new_cache(model, num_slots, format)
        except (OSError, OverflowError, MemoryError):
            raise OutOfMemoryError(
                f"a cache of {num_slots} positions does not fit into memory; lower cache_positions"
            ) from None
        # Slots are used in their order, so that a large pool costs nothing until it is used.
        self._num_touched = 0
        self._freed: list[int] = []
        self.max_used = 0
        self.reclaim: Callable[[int], None] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the keys and values of all slots, in bytes."""
        return self.bytes_per_slot * self.num_slots

    @property
    def bytes_per_slot(self) -> int:
        """Size of the keys and values of a slot, in bytes."""
        return bytes_per_position(self.cache)

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_used

    @property
    def num_used(self) -> int:
        return self._num_touched - len(self._freed)

    def allocate(self, count: int) -> Slots:
        """Allocate `count` slots, int32 `[count]`, each with one reference.

        Raises:
            PoolFull: Fewer than `count` slots are free; none is allocated.
        """
        if count > self.num_free and self.reclaim is not None:
            self.reclaim(count - self.num_free)
        if count > self.num_free:
            raise PoolFull(f"{count} slots requested, {self.num_free} free")
        num_kept = max(0, len(self._freed) - count)
        reused, self._freed[num_kept:] = self._freed[num_kept:][::-1], []
        end = self._num_touched + count - len(reused)
        allocated = np.array([*reused, *range(self._num_touched, end)], np.int32)
        self._num_touched = end
        self.references[allocated] = 1
        self.max_used = max(self.max_used, self.num_used)
        return allocated

    def add_reference(self, slots: Slots) -> None:
        """Add one reference to each of `slots` (distinct; -1 is skipped)."""
        self.references[slots[slots >= 0]] += 1

    def free(self, slots: Slots) -> None:
        """Remove one reference from each of `slots` (distinct; -1 is skipped). Slots without
        references become free."""
        slots = slots[slots >= 0]
        self.references[slots] -= 1
        freed = slots[self.references[slots] == 0]
        if self.cache.states is not None:
            self.cache.states.forget(freed)
        self._freed.extend(freed[::-1].tolist())

    def check_integrity(self, tables: list[Slots]) -> None:
        """Check that the reference counts equal the occurrences of each slot in `tables`.

        Raises:
            AssertionError: Counts or free list are inconsistent.
        """
        expected = np.zeros(self.num_slots, np.int32)
        for slots in tables:
            table_slots = slots[slots >= 0]
            assert len(np.unique(table_slots)) == len(table_slots), "a table contains a slot twice"
            expected[table_slots] += 1
        assert np.array_equal(expected, self.references), "reference counts are wrong"
        freed = np.array(self._freed, np.int64)
        assert len(np.unique(freed)) == len(freed), "the free list contains a slot twice"
        touched = expected[: self._num_touched]
        assert np.array_equal(np.sort(freed), np.flatnonzero(touched == 0)), (
            "the free list is wrong"
        )
        assert not expected[self._num_touched :].any(), "a slot is used that was never allocated"
