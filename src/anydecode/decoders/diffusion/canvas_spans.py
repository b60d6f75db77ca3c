"""Rows laid on a canvas: what diffusion decoders ask of a pass.

A `CanvasSpan` computes some positions against a context that may hold others. Kept, they become (or
replace) the context's; not kept, they stand in for them within this pass only, so that several
canvases can be looked at side by side over one cache. `CausalSpan` is the causal form: rows in
an order of their own, each seeing the context and the rows before it, at their true positions."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from anydecode.kernels.interface import Rows
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import ScoreRequest
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.span import Span
from anydecode.scoring.tree import ROOT


@dataclass(eq=False)
class CanvasSpan(Span):
    """Rows at `positions` (ascending), each seeing the first `visible` positions of the context,
    with
    these rows in their places. Where the context ends before, positions that nobody lays are holes.
    """

    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    visible: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    keep: bool = False
    _slots: np.ndarray | None = field(default=None, init=False)

    def reserve(self, count: int) -> None:
        context = self.context
        if not self.keep:
            self._slots = context.allocate_scratch(count)
            return
        held = context.length
        old = self.positions[self.positions < held]
        if len(old) == held:
            context.make_exclusive(0, held)
        else:
            for position in old:
                context.make_exclusive(int(position), int(position) + 1)
        longer = int(self.positions[-1]) + 1 - held
        if longer > 0:
            context.append(longer)
            holes = np.setdiff1d(np.arange(held, held + longer), self.positions)
            if len(holes):
                context.evict(holes.tolist())

    def fill(self, rows: Rows, at: int, count: int) -> None:
        stop = at + count
        self._inputs(rows, at, count)
        rows.table[at:stop] = len(rows.tables)
        table = self.context.table
        if self._slots is not None:
            length = max(len(table), int(self.positions[-1]) + 1, int(self.visible.max()))
            table = np.full(length, -1, np.int32)
            table[: self.context.length] = self.context.table
            table[self.positions] = self._slots
        rows.tables.append(table)
        rows.slots[at:stop] = table[self.positions]
        rows.positions[at:stop] = self.positions
        rows.prefix[at:stop] = np.minimum(self.visible, len(table))
        rows.tail_start[at:stop] = 0
        rows.tail_length[at:stop] = 0

    def complete(self, hidden: torch.Tensor | None, count: int) -> None:
        if self._slots is not None:
            self.context.free_scratch(self._slots)
            self._slots = None
        else:
            self.context.reusable = False
            held = self.context.tokens
            held += [-1] * (self.context.length - len(held))
            for position, token in zip(self.positions, self.tokens, strict=True):
                if position < len(held):  # else the context was cut while the pass was under way
                    held[position] = int(token)
        self.done += count


@dataclass(eq=False)
class CausalSpan(Span):
    """Rows behind the context, at `positions` in any order; each sees the context, the rows
    before it
    in this order, and itself. Nothing is kept."""

    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    _slots: np.ndarray | None = field(default=None, init=False)

    def reserve(self, count: int) -> None:
        self._slots = self.context.allocate_scratch(count)

    def fill(self, rows: Rows, at: int, count: int) -> None:
        assert self._slots is not None
        stop = at + count
        self._inputs(rows, at, count)
        self._table(rows, at, count)
        rows.slots[at:stop] = self._slots
        rows.positions[at:stop] = self.positions
        rows.prefix[at:stop] = self.context.length
        rows.tail_start[at:stop] = len(rows.tails)
        rows.tail_length[at:stop] = np.arange(1, count + 1)
        rows.tails = np.concatenate([rows.tails, self._slots])

    def complete(self, hidden: torch.Tensor | None, count: int) -> None:
        assert self._slots is not None
        self.context.free_scratch(self._slots)
        self._slots = None
        self.done += count


def canvas_span(
    context: SequenceCache,
    positions: np.ndarray,
    tokens: np.ndarray,
    visible: np.ndarray,
    *,
    keep: bool = False,
    embeddings: torch.Tensor | None = None,
    taps: tuple[int, ...] = (),
) -> CanvasSpan:
    """Rows of `tokens` at `positions` through all layers. `embeddings`, float32
    `[rows, hidden_size]`, stand in place of the tokens."""
    depth = context.pool.model.spec.num_layers
    return CanvasSpan(
        context,
        tokens.tolist(),
        0,
        depth,
        capture_layers=taps,
        inputs=embeddings,
        positions=np.asarray(positions, np.int32),
        visible=np.asarray(visible, np.int32),
        keep=keep,
    )


def causal_span(context: SequenceCache, positions: np.ndarray, tokens: np.ndarray) -> CausalSpan:
    """Causal rows of `tokens` at `positions`, in this order, through all layers."""
    depth = context.pool.model.spec.num_layers
    return CausalSpan(context, tokens.tolist(), 0, depth, positions=np.asarray(positions, np.int32))


def score_of(
    sequence: Sequence,
    runner: str,
    spans: Seq[Span],
    num_canvases: int,
    wanted: np.ndarray,
    shift: int,
) -> ScoreRequest:
    """A score of `spans`, run in order, of which each of the last `looks` answers for the positions
    `wanted`, one after the other. Raises ValueError where one has no row that predicts them."""
    held: list[int] = []
    for span in spans[len(spans) - num_canvases :]:
        assert isinstance(span, CanvasSpan | CausalSpan)
        rows = {int(position): row for row, position in enumerate(span.positions)}
        try:
            span.output_rows = [rows[int(position) - shift] for position in wanted]
        except KeyError as error:
            raise ValueError(f"no row predicts position {int(error.args[0]) + shift}") from None
        held += [span.tokens[row] for row in span.output_rows]
    positions = np.tile(wanted, num_canvases)
    return ScoreRequest(sequence, runner, [list(spans)], positions, [ROOT] * len(held), held)
