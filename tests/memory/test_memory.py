"""Sequence caches, the pool and the prefix cache against plain lists, for random operations."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from anydecode.errors import OutOfMemoryError
from anydecode.kernels.interface import KeyValues
from anydecode.memory.pool import KVPool, PoolFull
from anydecode.memory.prefix import BLOCK, PrefixCache
from anydecode.memory.sequence_cache import EarlyExitRows, SequenceCache
from anydecode.models.scripted import ScriptedModel


def states(count: int) -> np.ndarray:
    return np.zeros((count, 2), np.float32)


class Storage:
    """A model that only has a cache, of one number per slot."""

    def new_cache(self, num_slots: int) -> KeyValues:
        keys, values = np.zeros((2, num_slots, 1, 1), np.float32)
        return KeyValues([keys], [values])


class Memory(RuleBasedStateMachine):
    """Every slot is stamped when it is allocated. The table of a sequence must always show the
    stamps of its own positions after any forks, truncations, evictions and shared prefixes."""

    kv_caches = Bundle("contexts")

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(Storage(), 160)
        self.prefixes = PrefixCache(self.pool)
        self.stamps = np.full(160, -1)
        self.next = 0
        self.live: dict[SequenceCache, list[int | None]] = {}

    def stamp(self, slots: np.ndarray) -> list[int]:
        numbers = list(range(self.next, self.next + len(slots)))
        self.next += len(slots)
        self.stamps[slots] = numbers
        return numbers

    @rule(target=kv_caches)
    def open(self) -> SequenceCache:
        kv_cache = SequenceCache(self.pool)
        self.live[kv_cache] = []
        return kv_cache

    @rule(kv_cache=kv_caches, count=st.integers(1, 24), data=st.data())
    def append(self, kv_cache: SequenceCache, count: int, data: st.DataObject) -> None:
        before = self.pool.num_free + self.prefixes.num_slots
        try:
            slots = kv_cache.append(count)
        except PoolFull:
            assert before < count or self.pool.num_free < count
            return
        self.live[kv_cache] += self.stamp(slots)
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
        kv_cache.tokens += tokens

    @rule(
        kv_cache=kv_caches,
        shape=st.lists(st.integers(-1, 6), min_size=1, max_size=8),
        data=st.data(),
    )
    def draft(self, kv_cache: SequenceCache, shape: list[int], data: st.DataObject) -> None:
        parents = [min(parent, node - 1) for node, parent in enumerate(shape)]
        try:
            pending = kv_cache.branch(list(range(len(parents))), parents, 1)
        except PoolFull:
            return
        numbers = self.stamp(pending.slots)
        node = data.draw(st.integers(-1, len(parents) - 1))
        path = pending.path(node)
        if data.draw(st.booleans()):
            kv_cache.retain(path)
            self.live[kv_cache] += [numbers[i] for i in path]
        else:
            kv_cache.discard()

    @rule(kv_cache=kv_caches, data=st.data())
    def truncate(self, kv_cache: SequenceCache, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, kv_cache.length))
        kv_cache.truncate(length)
        del self.live[kv_cache][length:]

    @rule(kv_cache=kv_caches, data=st.data())
    def evict(self, kv_cache: SequenceCache, data: st.DataObject) -> None:
        if kv_cache.length:
            positions = data.draw(st.lists(st.integers(0, kv_cache.length - 1), max_size=4))
            kv_cache.evict(positions)
            for position in positions:
                self.live[kv_cache][position] = None

    @rule(kv_cache=kv_caches, data=st.data())
    def overwrite(self, kv_cache: SequenceCache, data: st.DataObject) -> None:
        if kv_cache.length:
            start = data.draw(st.integers(0, kv_cache.length - 1))
            stop = data.draw(st.integers(start + 1, kv_cache.length))
            try:
                slots = kv_cache.make_exclusive(start, stop)
            except PoolFull:
                return
            self.live[kv_cache][start:stop] = self.stamp(slots)
            kv_cache.reusable = False

    @rule(target=kv_caches, kv_cache=kv_caches)
    def fork(self, kv_cache: SequenceCache) -> SequenceCache:
        other = kv_cache.fork()
        self.live[other] = list(self.live[kv_cache])
        return other

    @rule(kv_cache=consumes(kv_caches))
    def release(self, kv_cache: SequenceCache) -> None:
        self.prefixes.insert(kv_cache)
        kv_cache.release()
        del self.live[kv_cache]

    @rule(target=kv_caches, tokens=st.lists(st.integers(0, 1), min_size=BLOCK, max_size=3 * BLOCK))
    def reopen(self, tokens: list[int]) -> SequenceCache:
        slots = self.prefixes.match(tokens)
        kv_cache = SequenceCache(self.pool)
        kv_cache.attach_prefix(slots, tokens[: len(slots)])
        self.live[kv_cache] = self.stamps[slots].tolist()
        return kv_cache

    @rule(count=st.integers(1, 60))
    def reclaim(self, count: int) -> None:
        self.prefixes.evict(count)

    @invariant()
    def tables_show_the_expected_stamps(self) -> None:
        for kv_cache, expected in self.live.items():
            shown = [None if slot < 0 else int(self.stamps[slot]) for slot in kv_cache.table]
            assert shown == expected
            kv_cache.check_integrity()
        tables = [table for kv_cache in self.live for table in kv_cache.referenced_slots()]
        self.pool.check_integrity(tables + self.prefixes.referenced_slots())


Memory.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestMemory = Memory.TestCase


def test_check_integrity_detects_a_wrong_reference_count() -> None:
    pool = KVPool(Storage(), 8)
    kv_cache = SequenceCache(pool)
    kv_cache.append(3)
    pool.check_integrity(kv_cache.referenced_slots())
    pool.references[kv_cache.table[1]] += 1
    with pytest.raises(AssertionError):
        pool.check_integrity(kv_cache.referenced_slots())


def test_check_integrity_detects_a_freed_slot_in_use() -> None:
    pool = KVPool(Storage(), 8)
    kv_cache = SequenceCache(pool)
    slots = kv_cache.append(2).copy()
    pool.free(slots)
    with pytest.raises(AssertionError):
        pool.check_integrity(kv_cache.referenced_slots())


def test_failed_allocation_changes_nothing() -> None:
    pool = KVPool(Storage(), 4)
    kv_cache = SequenceCache(pool)
    with pytest.raises(PoolFull):
        kv_cache.append(5)
    assert (kv_cache.length, pool.num_free) == (0, 4)


def test_a_pool_without_slots_is_rejected() -> None:
    with pytest.raises(OutOfMemoryError):
        KVPool(Storage(), 0)


def test_a_pool_counts_the_most_slots_in_use() -> None:
    pool = KVPool(Storage(), 8)
    first = pool.allocate(3)
    pool.free(pool.allocate(4))
    pool.allocate(1)
    assert (pool.num_used, pool.max_used) == (4, 7)
    pool.max_used = pool.num_used
    pool.free(first)
    pool.allocate(2)
    assert (pool.num_used, pool.max_used) == (3, 4)
    assert pool.bytes_per_slot * 8 == pool.num_bytes


def test_a_pool_takes_memory_for_the_slots_that_are_used() -> None:
    tracemalloc.start()
    try:
        pool = KVPool(Storage(), 10_000_000)
        kv_cache = SequenceCache(pool)
        slots = kv_cache.append(3).tolist()
        pool.free(kv_cache.append(2).copy())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (slots, pool.num_used, pool.num_free) == ([0, 1, 2], 3, 9_999_997)
    assert peak < 121_000_000  # of arrays, which the system gives when they are used


def test_truncation_cuts_early_exit_rows() -> None:
    kv_cache = SequenceCache(KVPool(Storage(), 16))
    kv_cache.append(4)
    kv_cache.append(6)
    kv_cache.partials.append(EarlyExitRows(4, 1, states(6)))
    kv_cache.truncate(7)
    assert (kv_cache.complete, len(kv_cache.partials[0].hidden)) == (4, 3)
    kv_cache.truncate(4)
    assert kv_cache.partials == []
    with pytest.raises(ValueError, match="every layer"):
        kv_cache.append(1), kv_cache.partials.append(EarlyExitRows(4, 1, states(1)))
        kv_cache.evict([4])


def test_retain_rejects_nodes_that_are_not_a_path() -> None:
    kv_cache = SequenceCache(KVPool(Storage(), 16))
    kv_cache.branch([5, 6, 7], [-1, 0, -1], 1)
    with pytest.raises(ValueError, match="not a path"):
        kv_cache.retain([0, 2])


def test_prefixes_are_matched_by_namespace_and_tokens() -> None:
    pool = KVPool(Storage(), 64)
    prefixes = PrefixCache(pool)
    kv_cache = SequenceCache(pool)
    kv_cache.append(40)
    kv_cache.tokens = list(range(40))
    prefixes.insert(kv_cache, "a")
    assert len(prefixes.match(list(range(40)), "a")) == 2 * BLOCK
    assert len(prefixes.match(list(range(40)), "b")) == 0
    assert len(prefixes.match([*range(20), *range(20)], "a")) == BLOCK


def test_sequences_with_holes_or_embeddings_are_not_shared() -> None:
    pool = KVPool(Storage(), 64)
    prefixes = PrefixCache(pool)
    kv_cache = SequenceCache(pool)
    kv_cache.append(20)
    kv_cache.tokens = [-1] * 20
    prefixes.insert(kv_cache)
    kv_cache.tokens = [0] * 20
    kv_cache.evict([3])
    prefixes.insert(kv_cache)
    assert prefixes.num_slots == 0


def test_positions_after_a_truncation_are_held_by_every_layer_again() -> None:
    """What limited the layers of a position does not limit that of the next one in its place."""
    cache = SequenceCache(KVPool(ScriptedModel(num_layers=4), 32))
    cache.append(6)
    cache.limit_layers(2, [1, 4, 2, 3])
    assert (cache.layer_table >= 0).sum(0).tolist() == [4, 4, 1, 4, 2, 3]
    branch = cache.fork()
    cache.truncate(3)
    cache.append(2)
    cache.skip([7])
    assert (cache.layer_table >= 0).sum(0).tolist() == [4, 4, 1, 4, 4, 0]
    assert (branch.layer_table >= 0).sum(0).tolist() == [4, 4, 1, 4, 2, 3]
    cache.truncate(0)
    cache.append(3)
    assert (cache.layer_table >= 0).sum(0).tolist() == [4, 4, 4]
