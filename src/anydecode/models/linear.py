"""A matrix product with a bias and a factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.interface import Backend, Weight


@dataclass(eq=False)
class Linear:
    """A matrix and its bias (float32 `[out_features]`), if any; `scale` multiplies the result.

    `update` is a low-rank update of a matrix that keeps its packed format (LoRA): the matrices down
    `[rank, in_features]` and up `[out_features, rank]`, in float32.
    """

    weight: Weight
    bias: np.ndarray | None = None
    scale: float = 1.0
    update: tuple[Weight, Weight] | None = None

    @property
    def matrices(self) -> list[Weight]:
        """Its matrix, and those of its update."""
        return [self.weight, *(self.update or ())]

    def apply(self, backend: Backend, x: Any) -> Any:
        """(x @ weight.T + bias + x @ down.T @ up.T) * scale"""
        y = backend.linear(x, self.weight, self.bias)
        if self.update is not None:
            down, up = self.update
            y = backend.add(y, backend.linear(backend.linear(x, down), up))
        return y if self.scale == 1.0 else backend.scale(y, self.scale)
