"""Rows laid on a canvas: what diffusion decoders ask of a pass.

A `Lay` computes some positions against a context that may hold others. Kept, they become (or
replace) the context's; not kept, they stand in for them within this pass only, so that several
canvases can be looked at side by side over one cache. `Ahead` is the causal form: rows in an order
of their own, each seeing the context and the rows before it, at their true positions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from anydecode.kernels.interface import Rows
from anydecode.memory.context import Context
from anydecode.scoring.score import Score
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.span import Span
from anydecode.scoring.tree import ROOT


@dataclass(eq=False)
class Lay(Span):
    """Rows at `places` (ascending), each seeing the first `visible` positions of the context, with
    these rows in their places. Where the context ends before, positions that nobody lays are holes.
    """

    places: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    visible: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    keep: bool = False
    _slots: np.ndarray | None = field(default=None, init=False)

    def reserve(self, count: int) -> None:
        context = self.context
        if not self.keep:
            self._slots = context.borrow(count)
            return
        held = context.length
        old = self.places[self.places < held]
        if len(old) == held:
            context.own(0, held)
        else:
            for place in old:
                context.own(int(place), int(place) + 1)
        longer = int(self.places[-1]) + 1 - held
        if longer > 0:
            context.append(longer)
            holes = np.setdiff1d(np.arange(held, held + longer), self.places)
            if len(holes):
                context.evict(holes.tolist())

    def fill(self, rows: Rows, at: int, count: int) -> None:
        stop = at + count
        self._inputs(rows, at, count)
        rows.table[at:stop] = len(rows.tables)
        table = self.context.table
        if self._slots is not None:
            length = max(len(table), int(self.places[-1]) + 1, int(self.visible.max()))
            table = np.full(length, -1, np.int32)
            table[: self.context.length] = self.context.table
            table[self.places] = self._slots
        rows.tables.append(table)
        rows.slots[at:stop] = table[self.places]
        rows.positions[at:stop] = self.places
        rows.prefix[at:stop] = np.minimum(self.visible, len(table))
        rows.tail_start[at:stop] = 0
        rows.tail_length[at:stop] = 0

    def settle(self, hidden: torch.Tensor | None, count: int) -> None:
        if self._slots is not None:
            self.context.repay(self._slots)
            self._slots = None
        else:
            self.context.reusable = False
            held = self.context.tokens
            held += [-1] * (self.context.length - len(held))
            for place, token in zip(self.places, self.tokens, strict=True):
                if place < len(held):  # else the context was cut while the pass was under way
                    held[place] = int(token)
        self.done += count


@dataclass(eq=False)
class Ahead(Span):
    """Rows behind the context, at `places` in any order; each sees the context, the rows before it
    in this order, and itself. Nothing is kept."""

    places: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    _slots: np.ndarray | None = field(default=None, init=False)

    def reserve(self, count: int) -> None:
        self._slots = self.context.borrow(count)

    def fill(self, rows: Rows, at: int, count: int) -> None:
        assert self._slots is not None
        stop = at + count
        self._inputs(rows, at, count)
        self._table(rows, at, count)
        rows.slots[at:stop] = self._slots
        rows.positions[at:stop] = self.places
        rows.prefix[at:stop] = self.context.length
        rows.tail_start[at:stop] = len(rows.tails)
        rows.tail_length[at:stop] = np.arange(1, count + 1)
        rows.tails = np.concatenate([rows.tails, self._slots])

    def settle(self, hidden: torch.Tensor | None, count: int) -> None:
        assert self._slots is not None
        self.context.repay(self._slots)
        self._slots = None
        self.done += count


def lay(
    context: Context,
    places: np.ndarray,
    tokens: np.ndarray,
    visible: np.ndarray,
    *,
    keep: bool = False,
    embeddings: torch.Tensor | None = None,
    taps: tuple[int, ...] = (),
) -> Lay:
    """Rows of `tokens` at `places` through all layers. `embeddings`, float32
    `[rows, hidden_size]`, stand in place of the tokens."""
    depth = context.pool.model.spec.num_layers
    return Lay(
        context,
        tokens.tolist(),
        0,
        depth,
        taps=taps,
        inputs=embeddings,
        places=np.asarray(places, np.int32),
        visible=np.asarray(visible, np.int32),
        keep=keep,
    )


def ahead(context: Context, places: np.ndarray, tokens: np.ndarray) -> Ahead:
    """Causal rows of `tokens` at `places`, in this order, through all layers."""
    depth = context.pool.model.spec.num_layers
    return Ahead(context, tokens.tolist(), 0, depth, places=np.asarray(places, np.int32))


def score_of(
    sequence: Sequence, lane: str, spans: Seq[Span], looks: int, wanted: np.ndarray, shift: int
) -> Score:
    """A score of `spans`, run in order, of which each of the last `looks` answers for the positions
    `wanted`, one after the other. Raises ValueError where one has no row that predicts them."""
    held: list[int] = []
    for span in spans[len(spans) - looks :]:
        assert isinstance(span, Lay | Ahead)
        rows = {int(place): row for row, place in enumerate(span.places)}
        try:
            span.answers = [rows[int(place) - shift] for place in wanted]
        except KeyError as error:
            raise ValueError(f"no row predicts position {int(error.args[0]) + shift}") from None
        held += [span.tokens[row] for row in span.answers]
    positions = np.tile(wanted, looks)
    return Score(sequence, lane, [list(spans)], positions, [ROOT] * len(held), held)
