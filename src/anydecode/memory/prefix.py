"""Prefixes that later requests can share, found by their tokens.

Blocks of `BLOCK` tokens form a tree; a block is found by its parent and its own tokens, so two
prefixes share what they have in common. `namespace` keeps apart what must not be shared (adapters,
tenants). Leaves that were used longest ago are given back first.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from anydecode.memory.context import Context
from anydecode.memory.pool import Pool, Slots

BLOCK = 16


@dataclass(eq=False)
class _Node:
    slots: Slots
    parent: _Node | None
    key: Hashable
    used: int = 0
    children: dict[Hashable, _Node] = field(default_factory=dict)


class PrefixCache:
    """Shares the slots of `pool` between requests whose prompts begin alike."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._roots: dict[Hashable, _Node] = {}
        self._clock = count(1)
        self.num_slots = 0
        self.num_hits = 0
        pool.reclaim = self.evict

    def match(self, tokens: Seq[int], namespace: Hashable = None) -> Slots:
        """Slots of the longest known prefix of `tokens`, int32; a multiple of `BLOCK` long."""
        node = self._roots.get(namespace)
        found: list[Slots] = []
        now = next(self._clock)
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            node = node.children.get(tuple(tokens[start : start + BLOCK])) if node else None
            if node is None:
                break
            node.used = now
            found.append(node.slots)
        self.num_hits += BLOCK * len(found)
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def insert(self, context: Context, namespace: Hashable = None) -> None:
        """Remember what `context` has computed."""
        if not context.reusable:
            return
        tokens = context.tokens
        empty = np.empty(0, np.int32)
        node = self._roots.setdefault(namespace, _Node(empty, None, namespace))
        now = next(self._clock)
        for start in range(0, min(len(tokens), context.complete) - BLOCK + 1, BLOCK):
            key = tuple(tokens[start : start + BLOCK])
            if min(key) < 0:
                return
            child = node.children.get(key)
            if child is None:
                child = _Node(context.table[start : start + BLOCK].copy(), node, key)
                self.pool.share(child.slots)
                self.num_slots += BLOCK
                node.children[key] = child
            child.used = now
            node = child

    def evict(self, num_slots: int) -> None:
        """Forget old leaves until `num_slots` more slots are free, or nothing is left."""
        goal = self.pool.num_free + num_slots
        order = count()
        leaves = [(leaf.used, next(order), leaf) for leaf in self._leaves()]
        heapq.heapify(leaves)
        while leaves and self.pool.num_free < goal:
            _, _, leaf = heapq.heappop(leaves)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.key]
            self.pool.give(leaf.slots)
            self.num_slots -= BLOCK
            if parent.parent is not None and not parent.children:
                heapq.heappush(leaves, (parent.used, next(order), parent))

    def clear(self) -> None:
        """Forget everything."""
        self.evict(self.pool.num_slots)
        self._roots.clear()

    def holdings(self) -> list[Slots]:
        """The tables that `Pool.check_integrity` counts."""
        return [node.slots for node in self._nodes()]

    def _nodes(self) -> list[_Node]:
        found: list[_Node] = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            found.extend(node.children.values())
        return found

    def _leaves(self) -> list[_Node]:
        return [node for node in self._nodes() if not node.children]
