"""The key-value cache of one sequence in one model: a table from positions to slots."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from anydecode.memory.pool import KVPool, Slots


@dataclass(eq=False)
class EarlyExitRows:
    """Consecutive positions, from `start`, that have run only through the first `depth` layers.

    `hidden` are their hidden states after those layers, float32 `[count, hidden_size]`.
    """

    start: int
    depth: int
    hidden: np.ndarray

    @property
    def stop(self) -> int:
        return self.start + len(self.hidden)


@dataclass(eq=False)
class PendingTree:
    """The nodes of a token tree after the last position, until `retain` selects a path.

    `slots` is int32 `[nodes]`; `parents` holds node indices, -1 for the first level; `num_layers`
    how many of the first layers hold each node that followed a route, None: all of all nodes.
    """

    slots: Slots
    tokens: list[int]
    parents: list[int]
    depth: int
    hidden: np.ndarray | None = None
    num_layers: list[int] | None = None

    def path(self, node: int) -> list[int]:
        """Node indices from the first level to `node`."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


class SequenceCache:
    """The key-value cache of one sequence: a table from positions to slots.

    Evicted positions are holes (-1); positions are never renumbered.

    Attributes:
        length: Number of positions, holes included.
        num_cached: Leading positions that came from the prefix cache.
        tokens: Tokens that have run, by position; -1 where the input was not a token.
        pending: A token tree after the last position, if any.
        partials: The positions that have not run through all layers, in order. They are always the
            last positions of the sequence.
        reusable: Whether the prefix cache may share these slots. False once positions were evicted
            or hold approximate values.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.length = 0
        self.num_cached = 0
        self.tokens: list[int] = []
        self._table = np.full(64, -1, np.int32)
        self.pending: PendingTree | None = None
        self._scratch: list[Slots] = []
        self.partials: list[EarlyExitRows] = []
        self.reusable = True
        self._stored: np.ndarray | None = None  # layers that hold each position; None: all of them

    @property
    def layer_table(self) -> Slots:
        """The slots that rows attend to: `table`, or int32 `[num_layers, length]` with -1 where a
        position has nothing stored in a layer."""
        if self._stored is None:
            return self.table
        layers = np.arange(self.pool.model.spec.num_layers)[:, None]
        return np.where(layers < self._stored[: self.length], self.table, -1).astype(np.int32)

    def limit_layers(self, start: int, counts: Seq[int]) -> None:
        """Only the first `counts[i]` layers hold position `start + i`: others do not see it."""
        depth = self.pool.model.spec.num_layers
        if self._stored is None:
            if all(count >= depth for count in counts):
                return
            self._stored = np.full(len(self._table), depth, np.int32)
        stop = min(start + len(counts), self.length)
        self._stored[start:stop] = counts[: stop - start]

    @property
    def table(self) -> Slots:
        """Slots by position, int32 `[length]`; a view."""
        return self._table[: self.length]

    @property
    def complete(self) -> int:
        """Number of leading positions that have run through every layer."""
        return self.partials[0].start if self.partials else self.length

    def append(self, count: int) -> Slots:
        """Allocate `count` new positions; returns their slots, int32 `[count]`.

        Raises:
            PoolFull: Too few slots are free; nothing is changed except that a pending token tree is
                discarded.
        """
        self.discard()
        slots = self.pool.allocate(count)
        self._grow(self.length + count)
        self._table[self.length : self.length + count] = slots
        self.length += count
        return slots

    def skip(self, tokens: Seq[int], num_always: int = 1) -> None:
        """Append positions that no row attends to, as if they were evicted. The first `num_always`
        positions of a sequence are left out by some models always, so that their hole does not keep
        the prefix cache from sharing the others."""
        self.discard()
        count = len(tokens)
        self.reusable = self.reusable and (not count or (self.length, count) == (0, num_always))
        self._grow(self.length + count)
        self._table[self.length : self.length + count] = -1
        self.length += count
        self.tokens += tokens

    def allocate_scratch(self, count: int) -> Slots:
        """Allocate slots for `count` rows of one pass that do not become positions. `free_scratch`
        frees them.

        Raises:
            PoolFull: Too few slots are free; nothing is changed except that a pending token tree is
                discarded.
        """
        self.discard()
        slots = self.pool.allocate(count)
        self._scratch.append(slots)
        return slots

    def free_scratch(self, slots: Slots) -> None:
        """Free the slots of `allocate_scratch`, unless `release` has already freed them."""
        remaining = [scratch for scratch in self._scratch if scratch is not slots]
        if len(remaining) < len(self._scratch):
            self.pool.free(slots)
            self._scratch = remaining

    def branch(self, tokens: Seq[int], parents: list[int], depth: int) -> PendingTree:
        """Allocate a token tree after the last position; a pending tree is discarded first.

        Args:
            tokens: One token per node.
            parents: The parent's index per node, -1 for the first level.
            depth: The number of layers that the nodes run through.

        Raises:
            PoolFull: Too few slots are free; no tree is pending then.
        """
        self.discard()
        self.pending = PendingTree(self.pool.allocate(len(parents)), list(tokens), parents, depth)
        return self.pending

    def grow_branch(self, tokens: Seq[int], parents: Seq[int]) -> PendingTree:
        """Allocate more nodes of the pending token tree.

        Raises:
            PoolFull: Too few slots are free; nothing is changed.
            ValueError: No token tree is pending.
        """
        pending = self.pending
        if pending is None:
            raise ValueError("no token tree is pending")
        pending.slots = np.concatenate([pending.slots, self.pool.allocate(len(tokens))])
        pending.tokens = [*pending.tokens, *tokens]
        pending.parents = [*pending.parents, *parents]
        return pending

    def shrink_branch(self, count: int) -> None:
        """Free all nodes of the pending token tree but the first `count`, if one is pending."""
        pending = self.pending
        if pending is not None:
            self.pool.free(pending.slots[count:])
            pending.slots, pending.tokens = pending.slots[:count], pending.tokens[:count]
            pending.parents = pending.parents[:count]

    def retain(self, path: Seq[int]) -> None:
        """Append the pending nodes of `path` (from the first level) as positions and free the other
        nodes.

        Raises:
            ValueError: No token tree is pending, or `path` is not a path of it.
        """
        pending = self.pending
        if pending is None:
            if len(path):
                raise ValueError("no token tree is pending")
            return
        parent = -1
        for node in path:
            if pending.parents[node] != parent:
                raise ValueError(f"{list(path)} is not a path of the pending token tree")
            parent = node
        index = np.asarray(path, np.int64)
        retained = pending.slots[index]
        dropped = np.ones(len(pending.slots), bool)
        dropped[index] = False
        self.pool.free(pending.slots[dropped])
        self.pending = None
        if pending.hidden is not None and len(path):
            self.partials.append(EarlyExitRows(self.length, pending.depth, pending.hidden[index]))
        self._grow(self.length + len(retained))
        self._table[self.length : self.length + len(retained)] = retained
        start, self.length = self.length, self.length + len(retained)
        self.tokens += [pending.tokens[node] for node in path]
        if pending.num_layers is not None:
            self.reusable = False
            self.limit_layers(start, [pending.num_layers[node] for node in path])

    def discard(self) -> None:
        """Free the pending token tree, if any."""
        if self.pending is not None:
            self.pool.free(self.pending.slots)
            self.pending = None

    def truncate(self, length: int) -> None:
        """Remove the positions from `length` on, and a pending token tree.

        Raises:
            ValueError: `length` is negative or larger than the current length.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} positions to {length}")
        self.discard()
        # The table is not cleared: a pass in flight on another thread may still read it.
        self.pool.free(self._table[length : self.length])
        self.length = length
        self.num_cached = min(self.num_cached, length)
        del self.tokens[length:]
        remaining = []
        for partial in self.partials:
            if partial.start < length:
                count = min(partial.stop, length) - partial.start
                remaining.append(
                    EarlyExitRows(partial.start, partial.depth, partial.hidden[:count])
                )
        self.partials = remaining

    def evict(self, positions: Seq[int]) -> None:
        """Free `positions` and leave holes; later rows do not attend to them.

        Raises:
            ValueError: A position has not run through every layer.
        """
        index = np.unique(np.asarray(positions, np.int64))
        if len(index) and not 0 <= index[0] <= index[-1] < self.complete:
            raise ValueError("only positions that have run through every layer can be evicted")
        self.pool.free(self._table[index])
        self._table[index] = -1
        self.reusable = self.reusable and not len(index)

    def make_exclusive(self, start: int, stop: int) -> Slots:
        """Make the slots of positions `start..stop` exclusive, so that they can be overwritten.
        Shared slots and holes are replaced by new slots, without a copy of their contents.

        Returns:
            The slots, int32 `[stop - start]`; a view of the table.

        Raises:
            PoolFull: Too few slots are free; nothing is changed.
        """
        part = self._table[start:stop]
        replace = np.flatnonzero((part < 0) | (self.pool.references[part] > 1))
        new_slots = self.pool.allocate(len(replace))
        self.pool.free(part[replace])
        part[replace] = new_slots
        return part

    def reorder(self, start: int, slots: Slots) -> None:
        """Put the slots from position `start` on, which are exclusive, in another order.

        Raises:
            ValueError: They are other slots.
        """
        part = self.table[start:]
        if not np.array_equal(np.sort(part), np.sort(slots)):
            raise ValueError("a table can only be put in another order of its own slots")
        part[:] = slots

    def repurpose(self, start: int, stop: int, count: int) -> Slots:
        """Make holes of positions `start..stop`, whose slots are exclusive, and keep the first
        `count` of these slots for other contents, until `free_scratch` or `release`.

        Returns:
            The kept slots, int32 `[count]`.
        """
        kept = self._table[start : start + count].copy()
        self.pool.free(self._table[start + count : stop])
        self._table[start:stop] = -1
        self._scratch.append(kept)
        self.reusable = False
        return kept

    def attach_prefix(self, slots: Slots, tokens: Seq[int]) -> None:
        """Start with positions that another sequence computed, and their tokens.

        Raises:
            ValueError: This sequence already has positions.
        """
        if self.length:
            raise ValueError("a prefix can be attached to an empty sequence only")
        self.pool.add_reference(slots)
        self._grow(len(slots))
        self._table[: len(slots)] = slots
        self.length = len(slots)
        self.tokens = list(tokens)

    def fork(self) -> SequenceCache:
        """A cache with the same positions, sharing the slots; only the table is copied."""
        other = SequenceCache(self.pool)
        other.attach_prefix(self.table, self.tokens)
        other.num_cached = self.num_cached
        other.partials = list(self.partials)
        other.reusable = self.reusable
        if self._stored is not None:
            other.limit_layers(0, self._stored[: self.length].tolist())
        return other

    def release(self) -> None:
        """Free every slot, scratch slots of passes included."""
        self.truncate(0)
        for slots in self._scratch:
            self.pool.free(slots)
        self._scratch = []

    def referenced_slots(self) -> list[Slots]:
        """The tables of this sequence, as `KVPool.check_integrity` takes them."""
        return [self.table, *self._scratch] + ([self.pending.slots] if self.pending else [])

    def check_integrity(self) -> None:
        """Raise AssertionError if the fields are inconsistent."""
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
        if self._stored is not None:
            depth = self.pool.model.spec.num_layers
            stored = np.full(len(self._table), depth, np.int32)
            stored[: self.length] = self._stored[: self.length]
            self._stored = stored
