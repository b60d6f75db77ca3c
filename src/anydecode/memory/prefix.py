"""Prefixes that later requests can share, found by their tokens.

Blocks of `BLOCK` tokens form a tree; a block is found by its parent and its own tokens, so two
prefixes share what they have in common. `namespace` keeps apart what must not be shared (adapters,
tenants). Leaves that were used longest ago are given back first; with a `Spill` they are kept
elsewhere and brought back bit by bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch

from anydecode.kernels.interface import KeyValues
from anydecode.memory.pool import KVPool, PoolFull, Slots
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.memory.spill import Spill

BLOCK = 16


@dataclass(eq=False)
class _Node:
    slots: Slots
    parent: _Node | None
    key: Hashable
    last_used: int = 0
    children: dict[Hashable, _Node] = field(default_factory=dict)
    digest: bytes | None = None  # of all tokens up to here, where blocks may be spilled


class PrefixCache:
    """Shares the slots of `pool` between requests whose prompts begin alike.

    With `spill`, evicted blocks go there. `told(namespace)` is a name of a namespace that means the
    same in every process, or None where its blocks are not to be spilled. While `busy`, a pass is
    under way that may still write to free slots, and nothing is brought back.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._roots: dict[Hashable, _Node] = {}
        self._clock = count(1)
        self._pinned = 0
        self.num_slots = 0
        self.num_hits = 0
        self.num_restored = 0
        self.spill: Spill | None = None
        self.namespace_id: Callable[[Hashable], str | None] = repr
        self.is_busy = False
        pool.reclaim = self.evict

    def match(self, tokens: Seq[int], namespace: Hashable = None) -> Slots:
        """Slots of the longest known prefix of `tokens`, int32; a multiple of `BLOCK` long."""
        if self.spill is not None:
            node: _Node | None = self._root(namespace)
        else:
            node = self._roots.get(namespace)
        matched: list[Slots] = []
        self._pinned = now = next(self._clock)
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            if node is None:
                break
            key = tuple(tokens[start : start + BLOCK])
            child = node.children.get(key)
            node = self._restore(node, key) if child is None else child
            if node is None:
                break
            node.last_used = now
            matched.append(node.slots)
        self._pinned = 0
        self.num_hits += BLOCK * len(matched)
        return np.concatenate(matched) if matched else np.empty(0, np.int32)

    def insert(self, context: SequenceCache, namespace: Hashable = None) -> None:
        """Remember what `context` has computed."""
        if not context.reusable:
            return
        tokens = context.tokens
        node = self._root(namespace)
        now = next(self._clock)
        for start in range(0, min(len(tokens), context.complete) - BLOCK + 1, BLOCK):
            key = tuple(tokens[start : start + BLOCK])
            if min(key) < 0:
                return
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, context.table[start : start + BLOCK].copy())
                self.pool.add_reference(child.slots)
            child.last_used = now
            node = child

    def evict(self, num_slots: int) -> None:
        """Give back old leaves until `num_slots` more slots are free, or nothing is left."""
        self._evict(self.pool.num_free + num_slots, self.spill)

    def flush(self) -> None:
        """Give everything back, to the spill if there is one."""
        self.evict(self.pool.num_slots)

    def clear(self) -> None:
        """Forget everything, spilled blocks too."""
        self._evict(self.pool.num_free + self.pool.num_slots, None)
        self._roots.clear()
        if self.spill is not None:
            self.spill.clear()

    def referenced_slots(self) -> list[Slots]:
        """The tables that `KVPool.check_integrity` counts."""
        return [node.slots for node in self._nodes()]

    def _root(self, namespace: Hashable) -> _Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Node(np.empty(0, np.int32), None, namespace)
        if self.spill is not None and root.digest is None:
            name = self.namespace_id(namespace)
            root.digest = None if name is None else hashlib.sha256(name.encode()).digest()
        return root

    def _add(self, parent: _Node, key: tuple[int, ...], slots: Slots) -> _Node:
        child = parent.children[key] = _Node(slots, parent, key)
        child.digest = _digest(parent, key)
        self.num_slots += BLOCK
        return child

    def _evict(self, target_free: int, spill: Spill | None) -> None:
        order = count()
        leaves = [(leaf.last_used, next(order), leaf) for leaf in self._leaves()]
        heapq.heapify(leaves)
        while leaves and self.pool.num_free < target_free:
            last_used, _, leaf = heapq.heappop(leaves)
            if last_used == self._pinned:
                return
            parent = leaf.parent
            assert parent is not None
            if spill is not None and leaf.digest is not None and leaf.digest not in spill:
                spill.put(leaf.digest, read_slots(self.pool.cache, leaf.slots))
            del parent.children[leaf.key]
            self.pool.free(leaf.slots)
            self.num_slots -= BLOCK
            if parent.parent is not None and not parent.children:
                heapq.heappush(leaves, (parent.last_used, next(order), parent))

    def _restore(self, parent: _Node, key: tuple[int, ...]) -> _Node | None:
        """Bring a spilled block back, if there is one and there is room."""
        digest = _digest(parent, key)
        if self.spill is None or self.is_busy or digest is None:
            return None
        block = self.spill.get(digest)
        if block is None:
            return None
        try:
            slots = self.pool.allocate(BLOCK)
        except PoolFull:
            return None
        if not write_slots(self.pool.cache, slots, block):
            self.pool.free(slots)
            return None
        self.num_restored += BLOCK
        return self._add(parent, key, slots)

    def _nodes(self) -> list[_Node]:
        nodes: list[_Node] = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            nodes.extend(node.children.values())
        return nodes

    def _leaves(self) -> list[_Node]:
        return [node for node in self._nodes() if not node.children]


def read_slots(cache: KeyValues, slots: Slots) -> bytes:
    """What `slots` hold, in every layer."""
    index = torch.from_numpy(slots.astype(np.int64))
    parts = [one[index.to(one.device)].cpu().contiguous() for one in _tensors(cache)]
    return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)


def write_slots(cache: KeyValues, slots: Slots, block: bytes) -> bool:
    """Put back what `read_slots` gave; False for bytes of another length."""
    index = torch.from_numpy(slots.astype(np.int64))
    tensors = _tensors(cache)
    sizes = [len(slots) * one[0].numel() * one.element_size() for one in tensors]
    if sum(sizes) != len(block):
        return False
    data, at = torch.frombuffer(bytearray(block), dtype=torch.uint8), 0
    for one, size in zip(tensors, sizes, strict=True):
        part = data[at : at + size].clone().view(one.dtype).view(len(slots), *one.shape[1:])
        one[index.to(one.device)] = part.to(one.device)
        at += size
    return True


def _tensors(cache: KeyValues) -> list[torch.Tensor]:
    """Every tensor of a cache; their first dimension is the slot."""
    lists = [getattr(cache, entry.name) for entry in dataclasses.fields(cache)]
    return [one for held in lists if isinstance(held, list) for one in held]


def _digest(parent: _Node, key: tuple[int, ...]) -> bytes | None:
    if parent.digest is None:
        return None
    return hashlib.sha256(parent.digest + np.array(key, "<i4").tobytes()).digest()
