"""Spans of canvas positions: the rows that diffusion decoders compute in a forward pass.

A `CanvasSpan` computes some positions while the cache holds keys and values of others. If it is
kept, its keys and values are written to the cache. If not, they replace the cache's within
this pass only, so that several canvases can be scored in one pass over one cache. A `CausalSpan`
is the causal form: its rows come in any order, and each sees the context and the rows before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from anydecode.kernels.interface import Rows
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import ScoreRequest
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.span import Span
from anydecode.scoring.tree import ROOT


@dataclass(eq=False)
class CanvasSpan(Span):
    """Rows at positions of a canvas, with attention to both sides.

    Each row sees the first `visible` positions, with this span's rows in place of the cache's.
    Positions that neither the cache nor this span has are masked out.

    Attributes:
        positions: The positions of the rows, int32 `[rows]`, ascending.
        visible: How many positions each row sees, int32 `[rows]`.
        keep: Whether the keys and values are written to the cache.
        windowed_from: In layers with a window, all rows see the same of what is before this
            position: what a row at this position would see. None: each row has its own window.
    """

    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    visible: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    keep: bool = False
    windowed_from: int | None = None
    _slots: np.ndarray | None = field(default=None, init=False)

    def reserve(self, count: int) -> None:
        kv_cache = self.kv_cache
        if not self.keep:
            self._slots = kv_cache.allocate_scratch(count)
            return
        kv_cache.reusable = False  # now, since it may be released during the pass
        length = kv_cache.length
        overwritten = self.positions[self.positions < length]
        if len(overwritten) == length:
            kv_cache.make_exclusive(0, length)
        else:
            for position in overwritten:
                kv_cache.make_exclusive(int(position), int(position) + 1)
        num_new = int(self.positions[-1]) + 1 - length
        if num_new > 0:
            kv_cache.append(num_new)
            holes = np.setdiff1d(np.arange(length, length + num_new), self.positions)
            if len(holes):
                kv_cache.evict(holes.tolist())

    def unreserve(self, count: int) -> None:
        if self._slots is not None:
            self.kv_cache.free_scratch(self._slots)
            self._slots = None

    def write_rows(self, rows: Rows, at: int, count: int) -> None:
        stop = at + count
        self._fill_inputs(rows, at, count)
        rows.table[at:stop] = len(rows.tables)
        table = self.kv_cache.table
        if self._slots is not None:
            length = max(len(table), int(self.positions[-1]) + 1, int(self.visible.max()))
            table = np.full(length, -1, np.int32)
            table[: self.kv_cache.length] = self.kv_cache.table
            table[self.positions] = self._slots
        rows.tables.append(table if self.windowed_from is None else self._windowed(table))
        rows.slots[at:stop] = table[self.positions]
        rows.positions[at:stop] = self.positions
        rows.prefix[at:stop] = np.minimum(self.visible, len(table))
        rows.tail_start[at:stop] = 0
        rows.tail_length[at:stop] = 0

    def _windowed(self, table: np.ndarray) -> np.ndarray:
        """The table of each layer, without what its window leaves out: int32
        `[num_layers, positions]`, or `[positions]` if no layer has a window."""
        assert self.windowed_from is not None
        layers = self.kv_cache.pool.model.spec.layers
        attentions = [layer.attention for layer in layers if layer.attention is not None]
        if all(attention.window is None for attention in attentions):
            return table
        tables = np.repeat(table[None], len(layers), 0)
        for layer, layer_table in zip(layers, tables, strict=True):
            if layer.attention is not None and layer.attention.window is not None:
                layer_table[: max(0, self.windowed_from + 1 - layer.attention.window)] = -1
        return tables

    def complete(self, hidden: np.ndarray | None, count: int) -> None:
        if self._slots is not None:
            self.unreserve(count)
        else:
            cached_tokens = self.kv_cache.tokens
            cached_tokens += [-1] * (self.kv_cache.length - len(cached_tokens))
            for position, token in zip(self.positions, self.tokens, strict=True):
                if position < len(cached_tokens):  # else the cache was cut during the pass
                    cached_tokens[position] = int(token)
        self.done += count


@dataclass(eq=False)
class CausalSpan(Span):
    """Rows after the cached positions, in any order of positions; never kept.

    Each row sees the cached positions, the rows before it in the order of the span, and itself.

    Attributes:
        positions: The positions of the rows, int32 `[rows]`.
    """

    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    _slots: np.ndarray | None = field(default=None, init=False)

    def reserve(self, count: int) -> None:
        self._slots = self.kv_cache.allocate_scratch(count)

    def unreserve(self, count: int) -> None:
        assert self._slots is not None
        self.kv_cache.free_scratch(self._slots)
        self._slots = None

    def write_rows(self, rows: Rows, at: int, count: int) -> None:
        assert self._slots is not None
        stop = at + count
        self._fill_inputs(rows, at, count)
        self._fill_table(rows, at, count)
        rows.slots[at:stop] = self._slots
        rows.positions[at:stop] = self.positions
        rows.prefix[at:stop] = self.kv_cache.length
        rows.tail_start[at:stop] = len(rows.tails)
        rows.tail_length[at:stop] = np.arange(1, count + 1)
        rows.tails = np.concatenate([rows.tails, self._slots])

    def complete(self, hidden: np.ndarray | None, count: int) -> None:
        self.unreserve(count)
        self.done += count


def visible_positions(
    positions: np.ndarray,
    length: int,
    block_size: int | None,
    origin: int = 0,
    context_stop: int = 0,
) -> np.ndarray:
    """How many positions of a canvas each row sees, int32 `[rows]`.

    Args:
        positions: The positions of the rows.
        length: The length of the canvas.
        block_size: Rows see up to the end of their block; None: the whole canvas.
        origin: The position from which blocks are counted.
        context_stop: Rows before this position see up to themselves only.
    """
    if block_size is None:
        return np.full(len(positions), length, np.int32)
    ends = origin + ((positions - origin) // block_size + 1) * block_size
    ends = np.where(positions < context_stop, positions + 1, ends)
    visible: np.ndarray = np.minimum(ends, length).astype(np.int32)
    return visible


def canvas_span(
    kv_cache: SequenceCache,
    positions: np.ndarray,
    tokens: np.ndarray,
    visible: np.ndarray,
    *,
    keep: bool = False,
    embeddings: np.ndarray | None = None,
    capture_layers: tuple[int, ...] = (),
) -> CanvasSpan:
    """A `CanvasSpan` of `tokens` at `positions` through all layers.

    If given, `embeddings`, float32 `[rows, hidden_size]`, are fed in place of the tokens.
    """
    depth = kv_cache.pool.model.spec.num_layers
    return CanvasSpan(
        kv_cache,
        tokens.tolist(),
        0,
        depth,
        capture_layers=capture_layers,
        inputs=embeddings,
        positions=np.asarray(positions, np.int32),
        visible=np.asarray(visible, np.int32),
        keep=keep,
    )


def causal_span(kv_cache: SequenceCache, positions: np.ndarray, tokens: np.ndarray) -> CausalSpan:
    """A `CausalSpan` of `tokens` at `positions`, in this order, through all layers."""
    depth = kv_cache.pool.model.spec.num_layers
    return CausalSpan(
        kv_cache, tokens.tolist(), 0, depth, positions=np.asarray(positions, np.int32)
    )


def score_canvas(
    sequence: Sequence,
    runner: str,
    spans: Seq[Span],
    num_canvases: int,
    target_positions: np.ndarray,
    shift: int,
) -> ScoreRequest:
    """A score request for `spans`, which run in order.

    Args:
        sequence: The sequence of the canvas.
        runner: The model runner ("target" or "draft").
        spans: The spans; the last `num_canvases` return logits.
        num_canvases: The number of canvases scored in this pass, one span each.
        target_positions: The positions to predict, the same for each canvas.
        shift: The logit shift of the model.

    Raises:
        ValueError: A span has no row that predicts one of the positions.
    """
    output_tokens: list[int] = []
    for span in spans[len(spans) - num_canvases :]:
        assert isinstance(span, CanvasSpan | CausalSpan)
        rows = {int(position): row for row, position in enumerate(span.positions)}
        try:
            span.output_rows = [rows[int(position) - shift] for position in target_positions]
        except KeyError as error:
            raise ValueError(f"no row predicts position {int(error.args[0]) + shift}") from None
        output_tokens += [span.tokens[row] for row in span.output_rows]
    positions = np.tile(target_positions, num_canvases)
    roots = [ROOT] * len(output_tokens)
    return ScoreRequest(sequence, runner, [list(spans)], positions, roots, output_tokens)
