"""Attention whose heads share one key, which is their value too, and its entries (DeepSeek-V4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.interface import Backend, Recurrence, Weight
from anydecode.models.linear import Linear


@dataclass(eq=False)
class EntryWeights:
    """The weights of entries, each of which stands for several positions, see `Backend.pool`.

    `values` and `gates` are `[groups * numbers, hidden_size]`; `bias` is float32 `[positions,
    groups, numbers]`.
    """

    values: Linear
    gates: Linear
    bias: np.ndarray

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        return [*self.values.matrices, *self.gates.matrices]

    def apply(self, backend: Backend, x: Any, layer: int, shape: Recurrence, first: int) -> Any:
        """The entries of the rows that end one; what they are made of is stored from number `first`
        of a slot on."""
        inputs = backend.join(self.values.apply(backend, x), self.gates.apply(backend, x))
        return backend.pool(inputs, layer, shape, first, self.bias)


@dataclass(eq=False)
class SharedKeyWeights:
    """The weights of such attention beside `LayerWeights.query`, `LayerWeights.key` and
    `LayerWeights.output`; see `SharedKeySpec`.

    `parts` has a matrix `[output_rank, heads * head_dim]` for each group of heads. `entry_norm` is
    float32 `[head_dim]`.
    """

    parts: list[Weight]
    entry: EntryWeights | None = None
    entry_norm: np.ndarray | None = None

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        return [*self.parts, *([] if self.entry is None else self.entry.matrices)]
