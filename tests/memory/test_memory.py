"""Sequence caches, the pool and the prefix cache against plain lists, for random operations."""

from __future__ import annotations

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

    contexts = Bundle("contexts")

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

    @rule(target=contexts)
    def open(self) -> SequenceCache:
        context = SequenceCache(self.pool)
        self.live[context] = []
        return context

    @rule(context=contexts, count=st.integers(1, 24), data=st.data())
    def append(self, context: SequenceCache, count: int, data: st.DataObject) -> None:
        before = self.pool.num_free + self.prefixes.num_slots
        try:
            slots = context.append(count)
        except PoolFull:
            assert before < count or self.pool.num_free < count
            return
        self.live[context] += self.stamp(slots)
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
        context.tokens += tokens

    @rule(
        context=contexts, shape=st.lists(st.integers(-1, 6), min_size=1, max_size=8), data=st.data()
    )
    def draft(self, context: SequenceCache, shape: list[int], data: st.DataObject) -> None:
        parents = [min(parent, node - 1) for node, parent in enumerate(shape)]
        try:
            pending = context.branch(list(range(len(parents))), parents, 1)
        except PoolFull:
            return
        numbers = self.stamp(pending.slots)
        node = data.draw(st.integers(-1, len(parents) - 1))
        path = pending.path(node)
        if data.draw(st.booleans()):
            context.retain(path)
            self.live[context] += [numbers[i] for i in path]
        else:
            context.discard()

    @rule(context=contexts, data=st.data())
    def truncate(self, context: SequenceCache, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, context.length))
        context.truncate(length)
        del self.live[context][length:]

    @rule(context=contexts, data=st.data())
    def evict(self, context: SequenceCache, data: st.DataObject) -> None:
        if context.length:
            positions = data.draw(st.lists(st.integers(0, context.length - 1), max_size=4))
            context.evict(positions)
            for position in positions:
                self.live[context][position] = None

    @rule(context=contexts, data=st.data())
    def overwrite(self, context: SequenceCache, data: st.DataObject) -> None:
        if context.length:
            start = data.draw(st.integers(0, context.length - 1))
            stop = data.draw(st.integers(start + 1, context.length))
            try:
                slots = context.make_exclusive(start, stop)
            except PoolFull:
                return
            self.live[context][start:stop] = self.stamp(slots)
            context.reusable = False

    @rule(target=contexts, context=contexts)
    def fork(self, context: SequenceCache) -> SequenceCache:
        other = context.fork()
        self.live[other] = list(self.live[context])
        return other

    @rule(context=consumes(contexts))
    def release(self, context: SequenceCache) -> None:
        self.prefixes.insert(context)
        context.release()
        del self.live[context]

    @rule(target=contexts, tokens=st.lists(st.integers(0, 1), min_size=BLOCK, max_size=3 * BLOCK))
    def reopen(self, tokens: list[int]) -> SequenceCache:
        slots = self.prefixes.match(tokens)
        context = SequenceCache(self.pool)
        context.attach_prefix(slots, tokens[: len(slots)])
        self.live[context] = self.stamps[slots].tolist()
        return context

    @rule(count=st.integers(1, 60))
    def reclaim(self, count: int) -> None:
        self.prefixes.evict(count)

    @invariant()
    def tables_show_the_expected_stamps(self) -> None:
        for context, expected in self.live.items():
            shown = [None if slot < 0 else int(self.stamps[slot]) for slot in context.table]
            assert shown == expected
            context.check_integrity()
        tables = [table for context in self.live for table in context.referenced_slots()]
        self.pool.check_integrity(tables + self.prefixes.referenced_slots())


Memory.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestMemory = Memory.TestCase


def test_check_integrity_detects_a_wrong_reference_count() -> None:
    pool = KVPool(Storage(), 8)
    context = SequenceCache(pool)
    context.append(3)
    pool.check_integrity(context.referenced_slots())
    pool.references[context.table[1]] += 1
    with pytest.raises(AssertionError):
        pool.check_integrity(context.referenced_slots())


def test_check_integrity_detects_a_freed_slot_in_use() -> None:
    pool = KVPool(Storage(), 8)
    context = SequenceCache(pool)
    slots = context.append(2).copy()
    pool.free(slots)
    with pytest.raises(AssertionError):
        pool.check_integrity(context.referenced_slots())


def test_failed_allocation_changes_nothing() -> None:
    pool = KVPool(Storage(), 4)
    context = SequenceCache(pool)
    with pytest.raises(PoolFull):
        context.append(5)
    assert (context.length, pool.num_free) == (0, 4)


def test_a_pool_without_slots_is_rejected() -> None:
    with pytest.raises(OutOfMemoryError):
        KVPool(Storage(), 0)


def test_truncation_cuts_early_exit_rows() -> None:
    context = SequenceCache(KVPool(Storage(), 16))
    context.append(4)
    context.append(6)
    context.partials.append(EarlyExitRows(4, 1, states(6)))
    context.truncate(7)
    assert (context.complete, len(context.partials[0].hidden)) == (4, 3)
    context.truncate(4)
    assert context.partials == []
    with pytest.raises(ValueError, match="every layer"):
        context.append(1), context.partials.append(EarlyExitRows(4, 1, states(1)))
        context.evict([4])


def test_retain_rejects_nodes_that_are_not_a_path() -> None:
    context = SequenceCache(KVPool(Storage(), 16))
    context.branch([5, 6, 7], [-1, 0, -1], 1)
    with pytest.raises(ValueError, match="not a path"):
        context.retain([0, 2])


def test_prefixes_are_matched_by_namespace_and_tokens() -> None:
    pool = KVPool(Storage(), 64)
    prefixes = PrefixCache(pool)
    context = SequenceCache(pool)
    context.append(40)
    context.tokens = list(range(40))
    prefixes.insert(context, "a")
    assert len(prefixes.match(list(range(40)), "a")) == 2 * BLOCK
    assert len(prefixes.match(list(range(40)), "b")) == 0
    assert len(prefixes.match([*range(20), *range(20)], "a")) == BLOCK


def test_sequences_with_holes_or_embeddings_are_not_shared() -> None:
    pool = KVPool(Storage(), 64)
    prefixes = PrefixCache(pool)
    context = SequenceCache(pool)
    context.append(20)
    context.tokens = [-1] * 20
    prefixes.insert(context)
    context.tokens = [0] * 20
    context.evict([3])
    prefixes.insert(context)
    assert prefixes.num_slots == 0
