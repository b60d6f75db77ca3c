"""One sequence's memory in one model: positions, and the slots that hold them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from anydecode.memory.pool import KVPool, Slots


@dataclass(eq=False)
class EarlyExitRows:
    """Consecutive positions from `start` that have run only through the first `depth` layers, and
    their hidden states there, float32 `[count, hidden_size]`."""

    start: int
    depth: int
    hidden: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.hidden)


@dataclass(eq=False)
class PendingTree:
    """Rows of a token tree behind the context's last position, until `retain` chooses a path."""

    slots: Slots
    tokens: list[int]
    parents: list[int]
    depth: int
    hidden: torch.Tensor | None = None

    def path(self, node: int) -> list[int]:
        """Node indices from the first level down to `node`."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


class SequenceCache:
    """A table from positions to slots. Evicted positions are holes (-1) and are never renumbered.

    `partials` lists the positions that have not run through all layers, in order; they are always
    the last positions of the context. `tokens` are those that have run, by position (-1 where the
    input was no token).
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.length = 0
        self.num_cached = 0  # leading positions that a prefix cache gave
        self.tokens: list[int] = []
        self._table = np.full(64, -1, np.int32)
        self.pending: PendingTree | None = None
        self._scratch: list[Slots] = []
        self.partials: list[EarlyExitRows] = []
        self.reusable = True

    @property
    def table(self) -> Slots:
        """Slots by position, int32 `[length]`; a view."""
        return self._table[: self.length]

    @property
    def complete(self) -> int:
        """How many leading positions have run through every layer."""
        return self.partials[0].start if self.partials else self.length

    def append(self, count: int) -> Slots:
        """Slots for `count` new positions. Raises `PoolFull`, changing nothing."""
        self.discard()
        slots = self.pool.allocate(count)
        self._grow(self.length + count)
        self._table[self.length : self.length + count] = slots
        self.length += count
        return slots

    def allocate_scratch(self, count: int) -> Slots:
        """Slots for `count` rows of one pass that become no positions; `free_scratch` gives them
        back.
        Raises `PoolFull`, changing nothing."""
        self.discard()
        slots = self.pool.allocate(count)
        self._scratch.append(slots)
        return slots

    def free_scratch(self, slots: Slots) -> None:
        """Give back what `allocate_scratch` took, unless it has gone with the context meanwhile."""
        rest = [held for held in self._scratch if held is not slots]
        if len(rest) < len(self._scratch):
            self.pool.free(slots)
            self._scratch = rest

    def branch(self, tokens: Seq[int], parents: list[int], depth: int) -> PendingTree:
        """Slots for a token tree behind the last position. Raises `PoolFull`, changing nothing."""
        self.discard()
        self.pending = PendingTree(self.pool.allocate(len(parents)), list(tokens), parents, depth)
        return self.pending

    def grow_branch(self, tokens: Seq[int], parents: Seq[int]) -> PendingTree:
        """Slots for more nodes of the pending token tree. Raises `PoolFull`, changing nothing."""
        pending = self.pending
        if pending is None:
            raise ValueError("no token tree is pending")
        pending.slots = np.concatenate([pending.slots, self.pool.allocate(len(tokens))])
        pending.tokens = [*pending.tokens, *tokens]
        pending.parents = [*pending.parents, *parents]
        return pending

    def retain(self, path: Seq[int]) -> None:
        """Keep the pending nodes of `path` (from the first level down) as the next positions."""
        pending = self.pending
        if pending is None:
            if len(path):
                raise ValueError("no token tree is pending")
            return
        parent = -1
        for node in path:
            if pending.parents[node] != parent:
                raise ValueError(f"{list(path)} is no path of the pending token tree")
            parent = node
        keep = np.asarray(path, np.int64)
        kept = pending.slots[keep]
        dropped = np.ones(len(pending.slots), bool)
        dropped[keep] = False
        self.pool.free(pending.slots[dropped])
        self.pending = None
        if pending.hidden is not None and len(path):
            self.partials.append(EarlyExitRows(self.length, pending.depth, pending.hidden[keep]))
        self._grow(self.length + len(kept))
        self._table[self.length : self.length + len(kept)] = kept
        self.length += len(kept)
        self.tokens += [pending.tokens[node] for node in path]

    def discard(self) -> None:
        """Drop a pending token tree."""
        if self.pending is not None:
            self.pool.free(self.pending.slots)
            self.pending = None

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} positions to {length}")
        self.discard()
        # The table is not wiped: a pass under way on another thread may still be reading it.
        self.pool.free(self._table[length : self.length])
        self.length = length
        self.num_cached = min(self.num_cached, length)
        del self.tokens[length:]
        kept = []
        for partial in self.partials:
            if partial.start < length:
                count = min(partial.stop, length) - partial.start
                kept.append(EarlyExitRows(partial.start, partial.depth, partial.hidden[:count]))
        self.partials = kept

    def evict(self, positions: Seq[int]) -> None:
        """Leave holes at `positions`; rows that come later do not see them."""
        index = np.unique(np.asarray(positions, np.int64))
        if len(index) and not 0 <= index[0] <= index[-1] < self.complete:
            raise ValueError("only positions that have run through every layer can be evicted")
        self.pool.free(self._table[index])
        self._table[index] = -1
        self.reusable = self.reusable and not len(index)

    def make_exclusive(self, start: int, stop: int) -> Slots:
        """Slots of positions `start..stop` that no one else refers to, to be overwritten. Shared
        ones and holes are replaced. Raises `PoolFull`, changing nothing."""
        part = self._table[start:stop]
        replace = np.flatnonzero((part < 0) | (self.pool.references[part] > 1))
        fresh = self.pool.allocate(len(replace))
        self.pool.free(part[replace])
        part[replace] = fresh
        return part

    def attach_prefix(self, slots: Slots, tokens: Seq[int]) -> None:
        """Begin with positions that another context computed, and their tokens."""
        if self.length:
            raise ValueError("only an empty context can adopt a prefix")
        self.pool.add_reference(slots)
        self._grow(len(slots))
        self._table[: len(slots)] = slots
        self.length = len(slots)
        self.tokens = list(tokens)

    def fork(self) -> SequenceCache:
        """A context with the same positions. Nothing is copied but the table."""
        other = SequenceCache(self.pool)
        other.attach_prefix(self.table, self.tokens)
        other.num_cached = self.num_cached
        other.partials = list(self.partials)
        other.reusable = self.reusable
        return other

    def release(self) -> None:
        """Give everything back, what a pass has borrowed and not repaid too."""
        self.truncate(0)
        for slots in self._scratch:
            self.pool.free(slots)
        self._scratch = []

    def referenced_slots(self) -> list[Slots]:
        """The tables that `KVPool.check_integrity` counts."""
        return [self.table, *self._scratch] + ([self.pending.slots] if self.pending else [])

    def check_integrity(self) -> None:
        """Raise AssertionError where the context contradicts itself."""
        position = self.complete
        for partial in self.partials:
            assert partial.start == position and 0 < len(partial.hidden)
            position = partial.stop
        assert position == self.length
        assert len(self.tokens) <= self.length
        assert np.all(self.table[self.complete :] >= 0)

    def _grow(self, length: int) -> None:
        if length > len(self._table):
            table = np.full(max(length, 2 * len(self._table)), -1, np.int32)
            table[: self.length] = self._table[: self.length]
            self._table = table
