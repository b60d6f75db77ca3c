"""A prefix cache: requests whose prompts start with the same tokens share key-value slots.

Blocks of `BLOCK` tokens form a radix tree, keyed by the parent block and the block's own tokens, so
two prefixes share their common blocks. A `namespace` separates prefixes that must not be shared
(adapters, tenants). The least recently used leaves are evicted first. With a `Spill`, evicted
blocks are stored elsewhere and restored block by block.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from anydecode.kernels.host import select
from anydecode.kernels.interface import KeyValues
from anydecode.memory.layer_load import LayerLoad, block_bytes
from anydecode.memory.pool import KVPool, PoolFull, Slots
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.memory.spill import Spill

BLOCK = 16


@dataclass(eq=False)
class _Node:
    slots: Slots
    parent: _Node | None
    key: Hashable
    children: dict[Hashable, _Node] = field(default_factory=dict)
    digest: bytes | None = None  # hash of the namespace and all tokens so far; None: not spilled

    @property
    def used_slots(self) -> Slots:
        """The slots without -1: a position that is left out has none."""
        return self.slots[self.slots >= 0]


class PrefixCache:
    """Shares the slots of `pool` between requests with a common prompt prefix.

    Attributes:
        num_slots: Slots that the tree references.
        num_hits: Prompt tokens found in the cache so far.
        num_restored: Tokens restored from the spill so far.
        spill: Storage for evicted blocks; None discards them.
        namespace_id: Maps a namespace to a string that is the same in every process, or to None if
            the blocks of this namespace must not be spilled.
        load: Restored blocks that are not written to the cache yet; None if there are none.
        busy: Whatever has a forward pass in flight, which may still write to free slots; nothing is
            restored meanwhile.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._roots: dict[Hashable, _Node] = {}  # those with blocks
        # Every block, the next one to evict first. Blocks of one use are in the order of their
        # positions from the last to the first, so that the next one is always a leaf.
        self._order: OrderedDict[_Node, None] = OrderedDict()
        self._pinned: set[_Node] = set()
        # By slot: the number of its blocks. Forks of a sequence within a block share its first
        # slots.
        self._num_blocks = np.zeros(pool.num_slots, np.int32)
        self.num_slots = 0
        self.num_hits = 0
        self.num_restored = 0
        self.spill: Spill | None = None
        self.namespace_id: Callable[[Hashable], str | None] = repr
        self.load: LayerLoad | None = None
        self._unloaded: set[_Node] = set()
        self.busy: set[object] = set()
        pool.reclaim = self.evict

    def match(
        self, tokens: Seq[int], namespace: Hashable = None, *, loads_later: bool = False
    ) -> Slots:
        """Look up the longest cached prefix of `tokens`.

        Args:
            tokens: The tokens.
            namespace: Their namespace.
            loads_later: Leave restored blocks in `load`, for the next pass, which waits for them.

        Returns:
            Its slots, int32 `[n]`, `n` a multiple of `BLOCK`.
        """
        if self.spill is not None:
            node: _Node | None = self._root(namespace)
        else:
            node = self._roots.get(namespace)
        path: list[_Node] = []
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            if node is None:
                break
            key = tuple(tokens[start : start + BLOCK])
            child = node.children.get(key)
            node = self._restore(node, key, path) if child is None else child
            if node is None:
                break
            path.append(node)
        self._pinned.clear()
        self._use(path)
        self.num_hits += BLOCK * len(path)
        if not loads_later:
            self.finish_load()
        return np.concatenate([one.slots for one in path]) if path else np.empty(0, np.int32)

    def insert(
        self, kv_cache: SequenceCache, namespace: Hashable = None, stop: int | None = None
    ) -> None:
        """Add the complete blocks of a sequence to the tree, or of its first `stop` positions."""
        if not kv_cache.reusable:
            return
        tokens = kv_cache.tokens
        node = self._root(namespace)
        path: list[_Node] = []
        end = min(len(tokens), kv_cache.complete)
        end = end if stop is None else min(end, stop)
        for start in range(0, end - BLOCK + 1, BLOCK):
            key = tuple(tokens[start : start + BLOCK])
            if min(key) < 0:
                break
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, kv_cache.table[start : start + BLOCK].copy())
                self.pool.add_reference(child.slots)
            path.append(child)
            node = child
        self._use(path)

    def finish_load(self) -> None:
        """Wait until every restored block is written. May be called on another thread."""
        load = self.load
        if load is not None:
            load.wait(load.num_layers)
            self._unloaded.clear()
            self.load = None

    def expect(self, prompts: Seq[tuple[Seq[int], Hashable]]) -> None:
        """Tell the spill which prompts wait, with their namespaces, the next one first: it keeps
        their blocks, and reads them ahead."""
        if self.spill is None:
            return
        queue, cached = [], set()
        for tokens, namespace in prompts:
            node: _Node | None = self._root(namespace)
            digest, keys = self._root(namespace).digest, list[bytes]()
            for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
                if digest is None:
                    break
                key = tuple(tokens[start : start + BLOCK])
                node = None if node is None else node.children.get(key)
                digest = _digest(digest, key)
                keys.append(digest)
                if node is not None:
                    cached.add(digest)
            queue.append(keys)
        self.spill.expect(queue, cached)

    def evict(self, num_slots: int) -> None:
        """Evict the least recently used leaves until `num_slots` more slots are free, or the tree
        is empty."""
        self._evict(self.pool.num_free + num_slots, self.spill)

    def flush(self) -> None:
        """Evict every block, to the spill if there is one."""
        self.evict(self.pool.num_slots)

    def clear(self) -> None:
        """Remove every block, spilled ones included."""
        self._evict(self.pool.num_free + self.pool.num_slots, None)
        self._roots.clear()
        if self.spill is not None:
            self.spill.clear()

    def referenced_slots(self) -> list[Slots]:
        """The slots of every block, as `KVPool.check_integrity` takes them."""
        return [node.slots for node in self._order]

    def _root(self, namespace: Hashable) -> _Node:
        """The root of a namespace; one without blocks is kept as soon as it has one."""
        root = self._roots.get(namespace)
        if root is None:
            root = _Node(np.empty(0, np.int32), None, namespace)
        if self.spill is not None and root.digest is None:
            name = self.namespace_id(namespace)
            root.digest = None if name is None else hashlib.sha256(name.encode()).digest()
        return root

    def _add(self, parent: _Node, key: tuple[int, ...], slots: Slots) -> _Node:
        if parent.parent is None:
            self._roots[parent.key] = parent
        child = parent.children[key] = _Node(slots, parent, key)
        child.digest = None if parent.digest is None else _digest(parent.digest, key)
        self._order[child] = None
        used = child.used_slots
        self._num_blocks[used] += 1
        self.num_slots += int(np.count_nonzero(self._num_blocks[used] == 1))
        return child

    def _use(self, path: Seq[_Node]) -> None:
        """Evict the blocks of a path after all others, the last one of them first."""
        for node in reversed(path):
            self._order.move_to_end(node)

    def _evict(self, target_free: int, spill: Spill | None) -> None:
        while self._order and self.pool.num_free < target_free:
            leaf = next(iter(self._order))
            if leaf in self._pinned:
                return
            assert leaf.parent is not None and not leaf.children
            if leaf in self._unloaded:
                self.finish_load()
            if spill is not None and leaf.digest is not None and leaf.digest not in spill:
                spill.put(leaf.digest, read_slots(self.pool.cache, leaf.slots))
            del leaf.parent.children[leaf.key], self._order[leaf]
            if leaf.parent.parent is None and not leaf.parent.children:
                self._roots.pop(leaf.parent.key, None)
            self.pool.free(leaf.slots)
            used = leaf.used_slots
            self._num_blocks[used] -= 1
            self.num_slots -= int(np.count_nonzero(self._num_blocks[used] == 0))

    def _restore(self, parent: _Node, key: tuple[int, ...], path: Seq[_Node]) -> _Node | None:
        """Restore a spilled block behind those of `path`, none of which is evicted for it; None if
        there is none or no slots are free."""
        if self.spill is None or self.busy or parent.digest is None:
            return None
        block = self.spill.get(_digest(parent.digest, key))
        if block is None or len(block) != block_bytes(self.pool.cache, BLOCK):
            return None
        if not self._pinned:
            self._use(path)
        self._pinned.update(path[len(self._pinned) :])
        try:
            slots = self.pool.allocate(BLOCK)
        except PoolFull:
            return None
        if self.load is None:
            self.load = LayerLoad(self.pool.cache)
        self.load.add(slots, block)
        self.num_restored += BLOCK
        node = self._add(parent, key, slots)
        self._unloaded.add(node)
        return node


def block_digests(name: str, tokens: Seq[int]) -> list[bytes]:
    """The keys under which the complete blocks of a text are stored in a spill, in order.

    Args:
        name: The `PrefixCache.namespace_id` of the namespace.
        tokens: The tokens of the text.
    """
    digests, digest = [], hashlib.sha256(name.encode()).digest()
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        digest = _digest(digest, tuple(tokens[start : start + BLOCK]))
        digests.append(digest)
    return digests


def read_blocks(cache: KeyValues, slots: Slots) -> list[bytes]:
    """The bytes of each block of `slots`, as `read_slots` gives them. Each array is read once."""
    num_blocks = len(slots) // BLOCK
    arrays = [
        select(array, slots).reshape(num_blocks, BLOCK, *array.shape[1:]) for array in cache.arrays
    ]
    return [b"".join(one[number].tobytes() for one in arrays) for number in range(num_blocks)]


def read_slots(cache: KeyValues, slots: Slots) -> bytes:
    """The bytes of `slots` in every array of the cache."""
    return b"".join(select(array, slots).tobytes() for array in cache.arrays)


def _digest(parent: bytes, key: tuple[int, ...]) -> bytes:
    return hashlib.sha256(parent + np.array(key, "<i4").tobytes()).digest()
