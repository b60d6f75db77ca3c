"""The rows of a pass on the device: integers per row, and one array of visible slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from anydecode.kernels.interface import Rows

#: The integers of each row, in this order.
FIELDS = (
    "tokens",
    "positions",
    "slots",
    "prefix",
    "tail_length",
    "tail_start",
    "table_start",
    "table_stride",
)


@dataclass(eq=False)
class DeviceRows:
    """`ints` is int32 `[len(FIELDS), n]`; `visible` is int32: all tables, then the tails.

    Row r attends to `visible[table_start + layer * table_stride:][:prefix]`, then
    `visible[tail_start:][:tail_length]`.
    """

    ints: torch.Tensor
    visible: torch.Tensor

    def __len__(self) -> int:
        return self.ints.shape[1]

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in FIELDS:
            raise AttributeError(name)
        return self.ints[FIELDS.index(name)]


def layout(rows: Rows, index: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of `DeviceRows` for all rows of a pass, or for the rows `index`."""
    sizes = np.array([table.size for table in rows.tables] + [0], np.int64)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    strides = np.array([t.shape[1] if t.ndim == 2 else 0 for t in rows.tables] + [0], np.int64)
    selected: slice | np.ndarray = slice(None) if index is None else index
    table = rows.table[selected]
    columns = (
        rows.tokens[selected],
        rows.positions[selected],
        rows.slots[selected],
        rows.prefix[selected],
        rows.tail_length[selected],
        rows.tail_start[selected] + starts[-1],
        starts[table],
        strides[table],
    )
    ints = np.stack([np.asarray(column, np.int32) for column in columns])
    visible = np.concatenate([*(table.reshape(-1) for table in rows.tables), rows.tails])
    return ints, np.ascontiguousarray(visible, np.int32)


def to_device(rows: Rows, index: np.ndarray, device: torch.device) -> DeviceRows:
    """Copy the rows `index` of a pass to the device."""
    ints, visible = layout(rows, index)
    return DeviceRows(torch.from_numpy(ints).to(device), torch.from_numpy(visible).to(device))
