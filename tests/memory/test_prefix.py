"""The prefix cache: which prefix is evicted, and what returns from the spill."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from anydecode.kernels.interface import KeyValues
from anydecode.memory.pool import KVPool
from anydecode.memory.prefix import BLOCK, PrefixCache, block_digests, read_blocks, read_slots
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.memory.spill import MemorySpill

ONE, TWO, THREE = ([number] * BLOCK for number in (1, 2, 3))


class Storage:
    """A model that only has a cache, of one number per slot."""

    def new_cache(self, num_slots: int) -> KeyValues:
        return KeyValues(*([np.zeros((num_slots, 1, 1), np.float32)] for _ in range(2)))


@pytest.fixture
def prefixes() -> PrefixCache:
    return PrefixCache(KVPool(Storage(), 8 * BLOCK))


def insert(
    prefixes: PrefixCache, tokens: list[int], first: float = 0.0, namespace: object = None
) -> None:
    """Insert a finished sequence whose keys are `first`, `first` + 1, ..."""
    kv_cache = SequenceCache(prefixes.pool)
    slots = kv_cache.append(len(tokens))
    kv_cache.tokens = list(tokens)
    keys = prefixes.pool.cache.keys[0]
    keys[slots, 0, 0] = first + np.arange(len(tokens))
    prefixes.insert(kv_cache, namespace)
    kv_cache.release()


def held(prefixes: PrefixCache, tokens: list[int]) -> int:
    """How many blocks of `tokens` are cached; this counts as a use of them."""
    return len(prefixes.match(tokens)) // BLOCK


def test_the_prefix_used_least_recently_is_evicted_from_its_end(prefixes: PrefixCache) -> None:
    for tokens in (ONE + TWO, TWO, THREE):
        insert(prefixes, tokens)
    assert held(prefixes, ONE + TWO) == 2
    prefixes.evict(1)  # a whole block
    assert [held(prefixes, tokens) for tokens in (ONE + TWO, TWO, THREE)] == [2, 0, 1]
    prefixes.evict(BLOCK)
    assert [held(prefixes, tokens) for tokens in (ONE + TWO, THREE)] == [1, 1]
    assert prefixes.num_slots == 2 * BLOCK
    assert prefixes.pool.num_free == 6 * BLOCK


@pytest.mark.parametrize("spills", [False, True])
def test_namespaces_without_blocks_take_no_memory(prefixes: PrefixCache, spills: bool) -> None:
    prefixes.spill = MemorySpill(4 * BLOCK * 8) if spills else None
    tracemalloc.start()
    try:
        for number in range(3000):
            if number == 1000:
                before = tracemalloc.get_traced_memory()[0]
            tokens = [number + 1] * BLOCK
            for wanted in (prefixes.match, lambda one, name: insert(prefixes, one, 0.0, name)):
                wanted(tokens, f"tenant {number}")
            prefixes.expect([(tokens, f"waiting tenant {number}")])
            if prefixes.pool.num_free < BLOCK:
                prefixes.evict(BLOCK)
        assert prefixes.num_slots >= 7 * BLOCK
        assert len(prefixes.match([3000] * BLOCK, "tenant 2999")) == BLOCK
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()


def test_only_whole_blocks_are_shared(prefixes: PrefixCache) -> None:
    insert(prefixes, [*ONE, *TWO[:-1]])
    assert held(prefixes, ONE + TWO) == 1
    assert held(prefixes, ONE[:-1]) == 0
    assert prefixes.num_hits == BLOCK


def test_evicted_blocks_return_from_the_spill(prefixes: PrefixCache) -> None:
    prefixes.spill = MemorySpill(1 << 20)
    insert(prefixes, ONE + TWO, first=100.0)
    prefixes.flush()
    assert (prefixes.num_slots, prefixes.pool.num_free) == (0, 8 * BLOCK)
    prefixes.busy.add(prefixes)
    assert len(prefixes.match(ONE + TWO)) == 0
    prefixes.busy.clear()
    slots = prefixes.match(ONE + TWO + THREE)
    keys = prefixes.pool.cache.keys[0][slots, 0, 0]
    assert keys.tolist() == list(range(100, 100 + 2 * BLOCK))
    assert prefixes.num_restored == 2 * BLOCK
    assert len(prefixes.match(TWO)) == 0  # the block of another prefix
    prefixes.clear()
    assert len(prefixes.match(ONE)) == 0


def test_namespaces_without_an_id_are_not_spilled(prefixes: PrefixCache) -> None:
    prefixes.spill = MemorySpill(1 << 20)
    prefixes.namespace_id = lambda namespace: None
    insert(prefixes, ONE)
    prefixes.flush()
    assert len(prefixes.spill) == 0


def test_restoring_a_prefix_does_not_evict_its_own_blocks() -> None:
    spill = MemorySpill(1 << 20)
    wide = PrefixCache(KVPool(Storage(), 3 * BLOCK))
    wide.spill = spill
    insert(wide, ONE + TWO + THREE)
    wide.flush()
    narrow = PrefixCache(KVPool(Storage(), 2 * BLOCK))
    narrow.spill = spill
    insert(narrow, THREE + ONE)
    assert held(narrow, ONE + TWO + THREE) == 2  # in place of the other prefix; the third would
    assert narrow.num_slots == 2 * BLOCK  # need the slots of the first


def test_branches_of_overwritten_sequences_are_not_shared(prefixes: PrefixCache) -> None:
    kv_cache = SequenceCache(prefixes.pool)
    kv_cache.append(BLOCK)
    kv_cache.tokens = list(ONE)
    kv_cache.reusable = False
    branch = kv_cache.fork()
    prefixes.insert(branch)
    assert held(prefixes, ONE) == 0
    kv_cache.release()
    branch.release()
    assert prefixes.pool.num_free == 8 * BLOCK


def test_the_keys_of_blocks_are_those_of_the_spill(prefixes: PrefixCache) -> None:
    prefixes.spill = MemorySpill(1 << 20)
    prefixes.namespace_id = str
    kv_cache = SequenceCache(prefixes.pool)
    kv_cache.append(2 * BLOCK)
    kv_cache.tokens = ONE + TWO
    prefixes.insert(kv_cache, "tenant")
    kv_cache.release()
    prefixes.flush()
    digests = block_digests("tenant", [*ONE, *TWO, 1])
    assert len(digests) == 2 and all(digest in prefixes.spill for digest in digests)
    others = block_digests("other", ONE + TWO) + block_digests("tenant", TWO + ONE)
    assert not any(digest in prefixes.spill for digest in others)


def test_blocks_are_read_as_their_slots_are(prefixes: PrefixCache) -> None:
    insert(prefixes, ONE + TWO, first=5.0)
    slots = prefixes.match(ONE + TWO)
    cache = prefixes.pool.cache
    parts = [slots[:BLOCK], slots[BLOCK:]]
    assert read_blocks(cache, slots) == [read_slots(cache, part) for part in parts]


@pytest.mark.parametrize("seed", range(4))
def test_evictions_are_those_of_a_search_for_the_oldest_leaf(seed: int) -> None:
    """The leaf with the oldest use is evicted, where a use of a prefix is one of all its blocks."""
    rng = np.random.default_rng(seed)
    prefixes = PrefixCache(KVPool(Storage(), 12 * BLOCK))
    uses: dict[tuple[int, ...], int] = {}  # by the numbers of the blocks from the first on

    def evict() -> None:
        leaves = [
            path for path in uses if not any(one[:-1] == path for one in uses if len(one) > 1)
        ]
        del uses[min(leaves, key=lambda path: uses[path])]

    for now in range(300):
        numbers = tuple(rng.integers(0, 3, rng.integers(1, 5)).tolist())
        tokens = [number for number in numbers for _ in range(BLOCK)]
        kind = rng.integers(0, 3)
        if kind == 0:
            expected = 0
            while numbers[: expected + 1] in uses and expected < len(numbers):
                uses[numbers[: expected + 1]] = now
                expected += 1
            assert held(prefixes, tokens) == expected
        elif kind == 1:
            while 12 - len(uses) < len(numbers):
                evict()
            insert(prefixes, tokens)
            uses.update({numbers[: end + 1]: now for end in range(len(numbers))})
        elif uses:
            evict()
            prefixes.evict(1)
        assert prefixes.num_slots == BLOCK * len(uses)


def test_positions_that_are_left_out_do_not_count_as_slots(prefixes: PrefixCache) -> None:
    kv_cache = SequenceCache(prefixes.pool)
    kv_cache.skip([1])
    kv_cache.append(BLOCK - 1)
    kv_cache.tokens += [1] * (BLOCK - 1)
    prefixes.insert(kv_cache)
    kv_cache.release()
    assert prefixes.num_slots == prefixes.pool.num_used == BLOCK - 1
    prefixes.clear()
    assert prefixes.num_slots == prefixes.pool.num_used == 0


def test_slots_that_blocks_of_forks_share_count_once(prefixes: PrefixCache) -> None:
    """A fork within a block shares its first slots. Rejects a count of 2 * BLOCK, by which requests
    would be admitted that do not fit."""
    whole = SequenceCache(prefixes.pool)
    whole.append(5)
    whole.tokens += [1] * 5
    fork = whole.fork()
    for number, kv_cache in enumerate([whole, fork]):
        kv_cache.append(BLOCK - 5)
        kv_cache.tokens += [number] * (BLOCK - 5)
        prefixes.insert(kv_cache)
        kv_cache.release()
    assert prefixes.num_slots == prefixes.pool.num_used == 2 * BLOCK - 5
    prefixes.evict(BLOCK)
    assert prefixes.num_slots == prefixes.pool.num_used == 0
