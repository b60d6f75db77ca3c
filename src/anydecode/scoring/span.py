"""Spans: groups of rows of one sequence cache that run together. A score request consists of spans.

The type of a span determines how its rows get cache slots, which positions they attend to, and
what happens to them after the pass. The engine does not distinguish prompts, draft trees and
denoising blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from anydecode.kernels.interface import STORE_ONLY, BurstDrafter, BurstDrafts, Rows, Variant
from anydecode.kernels.routes import Guide, Route
from anydecode.memory.pool import PoolFull
from anydecode.memory.sequence_cache import EarlyExitRows, SequenceCache


@dataclass(eq=False)
class Span(ABC):
    """Rows of one sequence cache that run through a range of layers.

    Life of a span: `reserve` allocates cache slots for the next rows, `write_rows` writes their
    metadata into the pass, `complete` updates the cache after the pass.

    Args:
        kv_cache: The sequence cache.
        tokens: Token id of each row.
        start: First layer.
        stop: End of the layer range; less than the model's depth for an early exit.
        output_rows: Indices of the rows to return, ascending.
        capture_layers: Layers whose hidden states to return for the output rows.
        logits: Whether to return logits for the output rows.
        inputs: float32 `[rows, hidden_size]`, used in place of `tokens`, or None. With the variant
            `STORE_ONLY` they are what is stored for `tokens`.
        embedded: Boolean `[rows]`: the rows that take `inputs`; the others take their tokens, and
            the cache has the tokens of both. None: all rows take `inputs`, if there are any.
        states: float32 `[rows, hidden_size]`, read beside `tokens` by a drafter, or None.
        adapters: The LoRA adapter of each row, or None: that of the sequence.

    Attributes:
        context: In the last layer, rows from this position on attend to positions before it alone;
            None for no such limit.
        state_layers: Layers whose hidden states of the last `num_states` rows are returned to
            `DraftStates`.
        other_states: Where several spans run the same rows, one after the other through their own
            layers: the states that those before have returned, by layer. One object for all; None
            where one span runs them.
    """

    kv_cache: SequenceCache
    tokens: Seq[int]
    start: int
    stop: int
    output_rows: Seq[int] = ()
    capture_layers: tuple[int, ...] = ()
    logits: bool = True
    inputs: np.ndarray | None = None
    embedded: np.ndarray | None = None
    states: np.ndarray | None = None
    adapters: Seq[int] | None = None
    context: int | None = field(default=None, init=False)
    state_layers: tuple[int, ...] = field(default=(), init=False)
    num_states: int = field(default=0, init=False)
    other_states: dict[int, np.ndarray] | None = field(default=None, init=False)
    done: int = field(default=0, init=False)  # rows that have run
    variant: Variant | None = field(default=None, init=False)  # None: the layers as they are
    guides: list[Guide] = field(default_factory=list, init=False)  # one per row of a route
    _append_start: int = field(default=0, init=False)  # first position appended in this pass

    #: Whether the rows may be divided among several passes.
    divisible = False

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        """Number of rows that have not run yet."""
        return len(self.tokens) - self.done

    @property
    def is_partial(self) -> bool:
        """Whether the rows stop before the last layer."""
        return self.stop < self.kv_cache.pool.model.spec.num_layers

    def drop(self, count: int) -> None:
        """Leave out the last `count` rows, which are output rows; none has run."""
        self.tokens = self.tokens[:-count]
        self.output_rows = self.output_rows[:-count]

    @abstractmethod
    def reserve(self, count: int) -> None:
        """Allocate slots for the next `count` rows. If the pool is full, raises `PoolFull` and
        changes nothing."""

    @abstractmethod
    def write_rows(self, rows: Rows, at: int, count: int) -> None:
        """Write the next `count` rows into `rows[at : at + count]`."""

    def unreserve(self, count: int) -> None:  # noqa: B027  optional: not all allocate in `reserve`
        """Undo `reserve`: the next `count` rows have left a pass, and will be reserved again. The
        cache may have been released or truncated meanwhile."""

    def complete(self, hidden: np.ndarray | None, count: int) -> None:
        """Called when `count` rows have run. `hidden`, `[count, hidden_size]`, is their hidden
        state at an early exit, else None. The cache may have been released or truncated
        meanwhile."""
        self.done += count

    def _fill_inputs(self, rows: Rows, at: int, count: int) -> None:
        stop = at + count
        rows.start[at:stop] = self.start
        rows.stop[at:stop] = self.stop
        if self.inputs is None:
            rows.tokens[at:stop] = self.tokens[self.done : self.done + count]
            if self.states is not None:
                assert rows.inputs is not None
                rows.inputs[at:stop] = self.states[self.done : self.done + count]
        else:
            rows.tokens[at:stop] = -1
            assert rows.inputs is not None
            rows.inputs[at:stop] = self.inputs[self.done : self.done + count]
            if self.embedded is not None:
                is_token = ~self.embedded[self.done : self.done + count]
                tokens = np.asarray(self.tokens[self.done : self.done + count], np.int32)
                rows.tokens[at:stop][is_token] = tokens[is_token]

    def _store_tokens(self, count: int) -> int:
        """Store the tokens of the `count` appended rows that have run in the cache. Returns how
        many of these rows the cache still has: it may have been truncated during the pass."""
        num_kept = max(0, min(count, self.kv_cache.length - self._append_start))
        has_tokens = self.inputs is None or self.embedded is not None
        if has_tokens or self.variant is STORE_ONLY:
            self.kv_cache.tokens += self.tokens[self.done : self.done + num_kept]
        else:
            self.kv_cache.tokens += [-1] * num_kept
        return num_kept

    def _limit_context(self, rows: Rows, at: int, count: int) -> None:
        """Give each row from position `context` on a table of its own, without the positions that
        the last layer does not see; tails become parts of them."""
        if self.context is None:
            return
        depth = self.kv_cache.pool.model.spec.num_layers
        for row in range(at, at + count):
            if rows.positions[row] < self.context:
                continue
            prefix, start = int(rows.prefix[row]), int(rows.tail_start[row])
            tail = rows.tails[start : start + int(rows.tail_length[row])]
            slots = np.concatenate([rows.tables[rows.table[row]][:prefix], tail])
            table = np.tile(slots.astype(np.int32), (depth, 1))
            table[-1, self.context :] = -1
            rows.table[row], rows.prefix[row] = len(rows.tables), len(slots)
            rows.tail_start[row] = rows.tail_length[row] = 0
            rows.tables.append(table)

    def _fill_table(self, rows: Rows, at: int, count: int) -> None:
        rows.table[at : at + count] = len(rows.tables)
        rows.tables.append(self.kv_cache.layer_table)


@dataclass(eq=False)
class ChainSpan(Span):
    """A causal chain: rows are appended to the cache; each attends to all positions before it and
    to itself."""

    divisible = True
    reserved: int = field(default=0, init=False)  # slots for the extra tokens of a multi-step pass

    @property
    def first_position(self) -> int:
        """The position of the first row, once some rows have been written."""
        return self._append_start - self.done

    def reserve(self, count: int) -> None:
        self.kv_cache.append(count)

    def unreserve(self, count: int) -> None:
        self.kv_cache.truncate(min(self._append_start, self.kv_cache.length))

    def write_rows(self, rows: Rows, at: int, count: int) -> None:
        stop = at + count
        length = self.kv_cache.length - self.reserved
        first = self._append_start = length - count
        self._fill_inputs(rows, at, count)
        self._fill_table(rows, at, count)
        rows.slots[at:stop] = self.kv_cache.table[first:length]
        if count == 1:
            rows.positions[at] = first
            rows.prefix[at] = length
        else:
            rows.positions[at:stop] = np.arange(first, length)
            rows.prefix[at:stop] = np.arange(first + 1, length + 1)
        rows.tail_start[at:stop] = 0
        rows.tail_length[at:stop] = 0
        self._stop_early(rows, at, count)
        self._limit_context(rows, at, count)

    def _stop_early(self, rows: Rows, at: int, count: int) -> None:
        """End rows whose outputs nobody reads after the last layer that stores something."""
        spec = self.kv_cache.pool.model.spec
        stop, first = spec.num_storing_layers, self.done
        if stop == spec.num_layers or self.is_partial or self.start or self.variant is not None:
            return
        unread = np.ones(count, bool)
        unread[[row - first for row in self.output_rows if first <= row < first + count]] = False
        unread[max(0, len(self) - self.num_states - first) :] = False
        rows.stop[at : at + count][unread] = stop

    def complete(self, hidden: np.ndarray | None, count: int) -> None:
        num_kept = self._store_tokens(count)
        if self.is_partial and num_kept:
            assert hidden is not None
            self.kv_cache.partials.append(
                EarlyExitRows(self._append_start, self.stop, hidden[:num_kept].copy())
            )
        if isinstance(self.variant, Route):
            if not self.variant.keeps_states:
                self.kv_cache.reusable = False
            if self.variant.leaves_holes:
                guides = self.guides[self.done : self.done + num_kept]
                counts = [guide.num_layers for guide in guides]
                self.kv_cache.limit_layers(self._append_start, counts)
        self.done += count


@dataclass(eq=False)
class JointSpan(ChainSpan):
    """The last rows of a chain, which also see each other."""

    divisible = False

    def write_rows(self, rows: Rows, at: int, count: int) -> None:
        super().write_rows(rows, at, count)
        rows.prefix[at : at + count] = self.kv_cache.length


@dataclass(eq=False)
class MultiStepSpan(ChainSpan):
    """A chain after which the backend may sample and score further tokens in the same pass.

    Args:
        extra_tokens: Maximum number of further tokens that are scored.
        end_tokens: Tokens after which the backend stops.
        min_probability: Of a draft, None of others: the backend also stops when the product of the
            tokens' probabilities is below it, and continues after any number of rows.
        drafts: Drafts that the backend may find in its steps.
        draft_cache: The cache of `drafts.drafter`, with the positions before its `first`.

    Attributes:
        multi_step_tokens: Set after the pass: all sampled tokens. The last one is not scored.
        probabilities: Those of these tokens, if they are a draft.
    """

    extra_tokens: int = 0
    end_tokens: frozenset[int] = frozenset()
    min_probability: float | None = None
    drafts: BurstDrafts | None = None
    draft_cache: SequenceCache | None = None
    multi_step_tokens: list[int] = field(default_factory=list, init=False)
    probabilities: list[float] = field(default_factory=list, init=False)

    def reserve(self, count: int) -> None:
        self.reserved = self.extra_tokens if count == self.remaining else 0
        try:
            self.kv_cache.append(count + self.reserved)
        except PoolFull:
            self.kv_cache.append(count)
            self.reserved = 0
        if self.drafts is not None and self.drafts.drafter is not None:
            self._reserve_drafter(self.drafts, self.drafts.drafter)

    def _reserve_drafter(self, drafts: BurstDrafts, drafter: BurstDrafter) -> None:
        """Reserve slots for what the drafter reads, or leave it out."""
        assert self.draft_cache is not None
        try:
            if not self.reserved:
                raise PoolFull
            self.draft_cache.append(len(drafter.tokens) + 1 + self.reserved)
            drafter.table = self.draft_cache.table
        except PoolFull:
            drafts.drafter = None

    def _keep_read(self, drafter: BurstDrafter) -> None:
        """Keep the positions that the drafter has read."""
        kv_cache, first = self.draft_cache, drafter.first
        assert kv_cache is not None
        if kv_cache.length == first + len(drafter.tokens) + 1 + self.reserved:  # else truncated
            kv_cache.truncate(first + drafter.num_read)
            kv_cache.tokens += [*drafter.tokens, *self.multi_step_tokens][: drafter.num_read]

    def unreserve(self, count: int) -> None:
        super().unreserve(count)
        if self.drafts is not None and self.drafts.drafter is not None:
            self._keep_read(self.drafts.drafter)
        self.reserved = 0

    def complete(self, hidden: np.ndarray | None, count: int) -> None:
        kv_cache, end = self.kv_cache, self._append_start + count
        super().complete(hidden, count)
        if kv_cache.length == end + self.reserved:  # else it was truncated during the pass
            if self.drafts is not None and self.drafts.table is not None:
                kv_cache.reorder(end, self.drafts.table[end:])
            kv_cache.tokens += self.multi_step_tokens[:-1]
            kv_cache.truncate(end + max(0, len(self.multi_step_tokens) - 1))
        if self.drafts is not None and self.drafts.drafter is not None:
            self._keep_read(self.drafts.drafter)
        self.reserved = 0


@dataclass(eq=False)
class TreeSpan(Span):
    """A token tree behind the last position of the cache; each row attends to the cache and to its
    own path. The tree stays pending until `SequenceCache.retain`.

    Args:
        parents: Parent of each node in the pending tree, `ROOT` for the first level.
        first: If not 0, that many nodes are already pending, and these are added.
        block: The nodes are paths of so many nodes, one after the other, which also see each other.

    With `inputs`, the nodes that have a token are fed this, and the others (-1) their row.
    """

    parents: list[int] = field(default_factory=list)
    first: int = 0
    block: int = 1

    def drop(self, count: int) -> None:
        super().drop(count)
        self.parents = self.parents[:-count]

    def reserve(self, count: int) -> None:
        if self.first:
            self.kv_cache.grow_branch(self.tokens, self.parents)
        else:
            self.kv_cache.branch(self.tokens, self.parents, self.stop)

    def unreserve(self, count: int) -> None:
        if self.first:
            self.kv_cache.shrink_branch(self.first)
        else:
            self.kv_cache.discard()

    def _fill_inputs(self, rows: Rows, at: int, count: int) -> None:
        super()._fill_inputs(rows, at, count)
        if self.inputs is not None:
            rows.tokens[at : at + count] = self.tokens

    def write_rows(self, rows: Rows, at: int, count: int) -> None:
        pending = self.kv_cache.pending
        assert pending is not None
        stop = at + count
        base = self.kv_cache.length
        self._fill_inputs(rows, at, count)
        self._fill_table(rows, at, count)
        first = self.first
        rows.slots[at:stop] = pending.slots[first:]
        rows.prefix[at:stop] = base
        depths = np.empty(first + count, np.int32)
        offset = len(rows.tails)
        tails: list[np.ndarray] = [rows.tails]
        for node, parent in enumerate(pending.parents):
            depths[node] = 1 if parent < 0 else depths[parent] + 1
            if node < first:
                continue
            last = node + self.block - 1 - (node - first) % self.block
            path = pending.slots[pending.path(last)]
            rows.tail_start[at + node - first] = offset
            rows.tail_length[at + node - first] = len(path)
            offset += len(path)
            tails.append(path)
        rows.positions[at:stop] = base + depths[first:] - 1
        rows.tails = np.concatenate(tails)
        self._limit_context(rows, at, count)

    def complete(self, hidden: np.ndarray | None, count: int) -> None:
        pending = self.kv_cache.pending
        if self.is_partial and pending is not None:
            assert hidden is not None
            pending.hidden = hidden.copy()
        if isinstance(self.variant, Route) and pending is not None:
            counts = [guide.num_layers for guide in self.guides]
            pending.num_layers = [*(pending.num_layers or ()), *counts]
        self.done += count


@dataclass(eq=False)
class CompletionSpan(Span):
    """Early-exit positions of the cache, `partial`, that run through their remaining layers."""

    partial: EarlyExitRows | None = None

    def reserve(self, count: int) -> None:
        pass

    def write_rows(self, rows: Rows, at: int, count: int) -> None:
        assert self.partial is not None
        stop = at + count
        first = self.partial.start
        self._fill_inputs(rows, at, count)
        self._fill_table(rows, at, count)
        rows.slots[at:stop] = self.kv_cache.table[first : first + count]
        rows.positions[at:stop] = np.arange(first, first + count)
        rows.prefix[at:stop] = np.arange(first + 1, first + count + 1)
        rows.tail_start[at:stop] = 0
        rows.tail_length[at:stop] = 0

    def complete(self, hidden: np.ndarray | None, count: int) -> None:
        assert self.partial is not None
        partials = self.kv_cache.partials
        if self.partial in partials:
            index = partials.index(self.partial)
            unfinished = []
            if self.is_partial:
                assert hidden is not None
                unfinished = [EarlyExitRows(self.partial.start, self.stop, hidden.copy())]
            partials[index : index + 1] = unfinished
        self.done += count
