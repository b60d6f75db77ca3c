"""The rows of a pass on the device: small arrays of integers, and one array of visible slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from anydecode.kernels.interface import Rows

#: The integers kept per row, in this order.
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
    """`ints` int32 `[len(FIELDS), n]`; `seen` int32: all tables, then the tails.

    Row r sees `seen[table_start + layer * table_stride:][:prefix]`, then
    `seen[tail_start:][:tail_length]`.
    """

    ints: torch.Tensor
    seen: torch.Tensor

    def __len__(self) -> int:
        return self.ints.shape[1]

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in FIELDS:
            raise AttributeError(name)
        return self.ints[FIELDS.index(name)]


def layout(rows: Rows, index: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of `DeviceRows` for the rows of a pass, or for those of `index`."""
    sizes = np.array([table.size for table in rows.tables] + [0], np.int64)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    strides = np.array([t.shape[1] if t.ndim == 2 else 0 for t in rows.tables] + [0], np.int64)
    where: slice | np.ndarray = slice(None) if index is None else index
    table = rows.table[where]
    columns = (
        rows.tokens[where],
        rows.positions[where],
        rows.slots[where],
        rows.prefix[where],
        rows.tail_length[where],
        rows.tail_start[where] + starts[-1],
        starts[table],
        strides[table],
    )
    ints = np.stack([np.asarray(column, np.int32) for column in columns])
    seen = np.concatenate([*(table.reshape(-1) for table in rows.tables), rows.tails])
    return ints, np.ascontiguousarray(seen, np.int32)


def to_device(rows: Rows, index: np.ndarray, device: torch.device) -> DeviceRows:
    """The rows of `index`, copied to the device."""
    ints, seen = layout(rows, index)
    return DeviceRows(torch.from_numpy(ints).to(device), torch.from_numpy(seen).to(device))
