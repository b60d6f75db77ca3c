"""Rows of one context, asked for together: the shapes a score is made of.

A span knows how its rows take their slots, what they see, and what becomes of them after the pass.
Whether rows are a prompt, a draft tree or a denoising block is nothing to the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from anydecode.kernels.interface import Rows
from anydecode.memory.pool import PoolFull
from anydecode.memory.sequence_cache import EarlyExitRows, SequenceCache


@dataclass(eq=False)
class Span(ABC):
    """`tokens` go through layers `start..stop` of `context`'s model. `answers` lists the rows whose
    logits are wanted, `taps` the layers whose hidden states are wanted for the same rows."""

    context: SequenceCache
    tokens: Seq[int]
    start: int
    stop: int
    output_rows: Seq[int] = ()
    capture_layers: tuple[int, ...] = ()
    logits: bool = True
    inputs: torch.Tensor | None = None  # float32 [rows, hidden], in place of `tokens`
    done: int = field(default=0, init=False)
    parallel: int = field(default=0, init=False)  # see `Network.grouped`
    _append_start: int = field(default=0, init=False)  # where appended rows of a pass begin

    #: Whether a pass may run some of the rows and leave the rest to the next.
    divisible = False

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.done

    @property
    def is_partial(self) -> bool:
        """Whether the rows stop before the last layer."""
        return self.stop < self.context.pool.model.spec.num_layers

    @abstractmethod
    def reserve(self, count: int) -> None:
        """Take slots for the next `count` rows. Raises `PoolFull`, changing nothing."""

    @abstractmethod
    def fill(self, rows: Rows, at: int, count: int) -> None:
        """Write the next `count` rows into `rows[at : at + count]`."""

    def complete(self, hidden: torch.Tensor | None, count: int) -> None:
        """The rows have run; `hidden` is their state where they stopped, if that was early. The
        context may have been released or cut meanwhile."""
        self.done += count

    def _inputs(self, rows: Rows, at: int, count: int) -> None:
        stop = at + count
        rows.start[at:stop] = self.start
        rows.stop[at:stop] = self.stop
        if self.inputs is None:
            rows.tokens[at:stop] = self.tokens[self.done : self.done + count]
        else:
            rows.tokens[at:stop] = -1
            assert rows.inputs is not None
            rows.inputs[at:stop] = self.inputs[self.done : self.done + count]

    def _store_tokens(self, count: int) -> int:
        """The `count` rows that have run were appended: the context gets their tokens. Returns how
        many of them it still has, since it may have been cut with the pass under way."""
        left = max(0, min(count, self.context.length - self._append_start))
        if self.inputs is None:
            self.context.tokens += self.tokens[self.done : self.done + left]
        else:
            self.context.tokens += [-1] * left
        return left

    def _table(self, rows: Rows, at: int, count: int) -> None:
        rows.table[at : at + count] = len(rows.tables)
        rows.tables.append(self.context.table)


@dataclass(eq=False)
class ChainSpan(Span):
    """Appended one after the other; each row sees everything before it and itself."""

    divisible = True
    reserved: int = field(default=0, init=False)  # positions behind the rows that a pass may fill

    def reserve(self, count: int) -> None:
        self.context.append(count)

    def fill(self, rows: Rows, at: int, count: int) -> None:
        stop = at + count
        length = self.context.length - self.reserved
        first = self._append_start = length - count
        self._inputs(rows, at, count)
        self._table(rows, at, count)
        rows.slots[at:stop] = self.context.table[first:length]
        if count == 1:
            rows.positions[at] = first
            rows.prefix[at] = length
        else:
            rows.positions[at:stop] = np.arange(first, length)
            rows.prefix[at:stop] = np.arange(first + 1, length + 1)
        rows.tail_start[at:stop] = 0
        rows.tail_length[at:stop] = 0

    def complete(self, hidden: torch.Tensor | None, count: int) -> None:
        left = self._store_tokens(count)
        if self.is_partial and left:
            assert hidden is not None
            self.context.partials.append(
                EarlyExitRows(self._append_start, self.stop, hidden[:left].clone())
            )
        self.done += count


@dataclass(eq=False)
class MultiStepSpan(ChainSpan):
    """A chain behind which the backend may go on with what it chooses: up to `ahead` tokens more
    are scored, until one of `ends` is said. `said` is then all that was chosen."""

    extra_tokens: int = 0
    end_tokens: frozenset[int] = frozenset()
    multi_step_tokens: list[int] = field(default_factory=list, init=False)

    def reserve(self, count: int) -> None:
        self.reserved = self.extra_tokens if count == self.remaining else 0
        try:
            self.context.append(count + self.reserved)
        except PoolFull:
            self.context.append(count)
            self.reserved = 0

    def complete(self, hidden: torch.Tensor | None, count: int) -> None:
        context, end = self.context, self._append_start + count
        super().complete(hidden, count)
        if context.length == end + self.reserved:  # else it was cut with the pass under way
            context.tokens += self.multi_step_tokens[:-1]
            context.truncate(end + max(0, len(self.multi_step_tokens) - 1))
        self.reserved = 0


@dataclass(eq=False)
class TreeSpan(Span):
    """A token tree behind the context's last position; each row sees the context and its own path.
    It stays pending until `SequenceCache.retain`. With `first`, `tokens` are the nodes from
    there on of a tree that is pending already; `parents` are the whole tree's."""

    parents: list[int] = field(default_factory=list)
    first: int = 0

    def reserve(self, count: int) -> None:
        if self.first:
            self.context.grow_branch(self.tokens, self.parents[self.first :])
        else:
            self.context.branch(self.tokens, self.parents, self.stop)

    def fill(self, rows: Rows, at: int, count: int) -> None:
        pending = self.context.pending
        assert pending is not None
        stop = at + count
        base = self.context.length
        self._inputs(rows, at, count)
        self._table(rows, at, count)
        first = self.first
        rows.slots[at:stop] = pending.slots[first:]
        rows.prefix[at:stop] = base
        depths = np.empty(first + count, np.int32)
        offset = len(rows.tails)
        tails: list[np.ndarray] = [rows.tails]
        for node, parent in enumerate(self.parents):
            depths[node] = 1 if parent < 0 else depths[parent] + 1
            if node < first:
                continue
            path = pending.slots[pending.path(node)]
            rows.tail_start[at + node - first] = offset
            rows.tail_length[at + node - first] = len(path)
            offset += len(path)
            tails.append(path)
        rows.positions[at:stop] = base + depths[first:] - 1
        rows.tails = np.concatenate(tails)

    def complete(self, hidden: torch.Tensor | None, count: int) -> None:
        pending = self.context.pending
        if self.is_partial and pending is not None:
            assert hidden is not None
            pending.hidden = hidden.clone()
        self.done += count


@dataclass(eq=False)
class Block(Span):
    """Rows that all see the context and each other; appended if `store`, else forgotten."""

    store: bool = False
    _slots: np.ndarray | None = field(default=None, init=False)

    def reserve(self, count: int) -> None:
        if self.store:
            self._slots = self.context.append(count)
        else:
            self._slots = self.context.allocate_scratch(count)

    def fill(self, rows: Rows, at: int, count: int) -> None:
        assert self._slots is not None
        stop = at + count
        base = self._append_start = self.context.length - (count if self.store else 0)
        self._inputs(rows, at, count)
        self._table(rows, at, count)
        rows.slots[at:stop] = self._slots
        rows.positions[at:stop] = np.arange(base, base + count)
        rows.prefix[at:stop] = base
        rows.tail_start[at:stop] = len(rows.tails)
        rows.tail_length[at:stop] = count
        rows.tails = np.concatenate([rows.tails, self._slots])

    def complete(self, hidden: torch.Tensor | None, count: int) -> None:
        assert self._slots is not None
        if self.store:
            self._store_tokens(count)
            self.context.reusable = False
        else:
            self.context.free_scratch(self._slots)
        self._slots = None
        self.done += count


@dataclass(eq=False)
class Overwrite(Span):
    """Rows for positions that the context already holds, at `positions`. Each sees the first
    `visible`
    positions of the context, itself and its fellows included."""

    visible: int = 0
    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # ascending

    def reserve(self, count: int) -> None:
        self.context.reusable = False  # at once: it may be released with the pass under way
        for position in self.positions:
            self.context.make_exclusive(int(position), int(position) + 1)

    def fill(self, rows: Rows, at: int, count: int) -> None:
        stop = at + count
        self._inputs(rows, at, count)
        self._table(rows, at, count)
        rows.slots[at:stop] = self.context.table[self.positions]
        rows.positions[at:stop] = self.positions
        rows.prefix[at:stop] = self.visible
        rows.tail_start[at:stop] = 0
        rows.tail_length[at:stop] = 0

    def complete(self, hidden: torch.Tensor | None, count: int) -> None:
        for position, token in zip(self.positions, self.tokens, strict=True):
            if position < len(self.context.tokens):  # else it was cut with the pass under way
                self.context.tokens[position] = token
        self.done += count


@dataclass(eq=False)
class CompletionSpan(Span):
    """The last positions of a context, which stopped at an early layer, run through the rest."""

    partial: EarlyExitRows | None = None

    def reserve(self, count: int) -> None:
        pass

    def fill(self, rows: Rows, at: int, count: int) -> None:
        assert self.partial is not None
        stop = at + count
        first = self.partial.start
        self._inputs(rows, at, count)
        self._table(rows, at, count)
        rows.slots[at:stop] = self.context.table[first : first + count]
        rows.positions[at:stop] = np.arange(first, first + count)
        rows.prefix[at:stop] = np.arange(first + 1, first + count + 1)
        rows.tail_start[at:stop] = 0
        rows.tail_length[at:stop] = 0

    def complete(self, hidden: torch.Tensor | None, count: int) -> None:
        assert self.partial is not None
        partials = self.context.partials
        if self.partial in partials:
            index = partials.index(self.partial)
            further = []
            if self.is_partial:
                assert hidden is not None
                further = [EarlyExitRows(self.partial.start, self.stop, hidden.clone())]
            partials[index : index + 1] = further
        self.done += count
