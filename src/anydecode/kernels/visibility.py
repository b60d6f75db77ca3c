"""The slots that each row of a pass attends to, as a rectangular array."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.kernels.interface import KEY_BLOCK, Attention, Rows


@dataclass(eq=False)
class VisibleSlots:
    """`slots` int64 `[n, width]`: column i is the slot of position i, or -1 where it has none or is
    masked. `width` is a multiple of `KEY_BLOCK`.
    """

    slots: np.ndarray
    width: int


def lengths(rows: Rows, index: np.ndarray) -> np.ndarray:
    """How many positions each of the rows `index` covers, including those without a slot."""
    total: np.ndarray = rows.prefix[index] + rows.tail_length[index]
    return total


def visible_slots(rows: Rows, index: np.ndarray, layer: int, shape: Attention) -> VisibleSlots:
    """The slots that the rows `index` attend to in `layer`, within its window or chunk."""
    longest = int(lengths(rows, index).max(initial=0))
    width = -(-longest // KEY_BLOCK) * KEY_BLOCK
    slots = np.full((len(index), width), -1, np.int64)
    for i, row in enumerate(index):
        prefix, count = int(rows.prefix[row]), int(rows.tail_length[row])
        if prefix:
            table = rows.tables[rows.table[row]]
            slots[i, :prefix] = (table[layer] if table.ndim == 2 else table)[:prefix]
        if count:
            start = int(rows.tail_start[row])
            slots[i, prefix : prefix + count] = rows.tails[start : start + count]
    positions = rows.positions[index].astype(np.int64)[:, None]
    if shape.window is not None:
        distance = positions - np.arange(width)[None, :]
        slots[(np.abs(distance) if shape.is_two_sided else distance) >= shape.window] = -1
    if shape.chunk is not None:
        slots[np.arange(width)[None, :] < positions // shape.chunk * shape.chunk] = -1
    return VisibleSlots(slots, width)
