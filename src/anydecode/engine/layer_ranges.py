"""A pass that runs one range of layers after the other.

Hidden states go from one range to the next as they are, so the outputs are those of a whole pass,
bit for bit. Between two ranges, rows may leave the pass, or it may wait for keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import ceil

import numpy as np

from anydecode.engine.plan import Plan
from anydecode.engine.schedule import ScheduledSpan
from anydecode.kernels.host import to_host
from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.models.interface import Model

#: Predicted duration of a range of layers, in seconds.
RANGE_SECONDS = 0.005


def predicted_range_size(scheduled: Seq[ScheduledSpan]) -> int:
    """The number of layers of a pass over `scheduled` that take `RANGE_SECONDS`, by the measured
    pass costs on this machine."""
    request, span, _ = scheduled[0]
    rows = sum(count for _, _, count in scheduled)
    positions = sum(count * span.kv_cache.length for _, span, count in scheduled)
    seconds = request.sequence.cost_model.seconds(rows, positions // rows)
    return ceil(span.kv_cache.pool.model.spec.num_layers * RANGE_SECONDS / seconds)


def has_layer_ranges(plan: Plan, model: Model) -> bool:
    """Whether the pass can be divided: its rows run through the same layers as they are, for one
    step, and the hidden states are all that goes from layer to layer."""
    rows, spec = plan.rows, model.spec
    return (
        not plan.multi_step
        and rows.variant is None
        and spec.starts_at_any_layer
        and not spec.recurrences
        and bool((rows.start == rows.start[0]).all() and (rows.stop == rows.stop[0]).all())
        and int(rows.stop[0]) > int(rows.start[0])
    )


def run_in_ranges(
    plan: Plan,
    model: Model,
    cache: KeyValues,
    size: int,
    before: Callable[[int], np.ndarray | None],
) -> Output | None:
    """Run a pass, see `has_layer_ranges`, in ranges of `size` layers.

    Args:
        plan: The pass. `before` may remove rows from it.
        model: The model.
        cache: Its key-value cache.
        size: Layers per range.
        before: Called with the end of each range before it runs. Returns the indices of the rows
            that stay in the pass; None: all of them.

    Returns:
        The outputs of the rows that have stayed; None if all have left.
    """
    first, last = int(plan.rows.start[0]), int(plan.rows.stop[0])
    states: np.ndarray | None = None
    hidden: dict[int, np.ndarray] = {}
    for start in range(first, last, size):
        stop = min(start + size, last)
        before_spec = plan.output_spec
        kept = before(stop)
        if kept is not None:
            if not plan.scheduled:
                return None
            hidden = {
                layer: rows[np.isin(before_spec.hidden[layer], kept)]
                for layer, rows in hidden.items()
            }
            states = None if states is None else states[kept]
        rows, spec = _rows(plan.rows, start, stop, states), plan.output_spec
        captured = {
            layer: index
            for layer, index in spec.hidden.items()
            if start <= layer < stop or layer == stop == last
        }
        if stop < last:
            every = np.arange(len(rows), dtype=np.int32)
            output = model.run(rows, cache, OutputSpec(every[:0], {**captured, stop: every}))
            states = to_host(output.hidden[stop]).copy()
        else:
            output = model.run(rows, cache, replace(spec, hidden=captured))
        hidden |= {layer: to_host(output.hidden[layer]).copy() for layer in captured}
    return replace(output, hidden=hidden)


def _rows(rows: Rows, start: int, stop: int, states: np.ndarray | None) -> Rows:
    """The rows of a pass in the layers [start, stop), with their hidden states before these; None:
    their own inputs."""
    rows = replace(rows, start=np.full_like(rows.start, start), stop=np.full_like(rows.stop, stop))
    if states is None:
        return rows
    return replace(rows, tokens=np.full_like(rows.tokens, -1), inputs=states)
