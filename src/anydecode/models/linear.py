"""A matrix product with a bias and a factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.formats import plain_weight
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


def update_weights(down: np.ndarray, up: np.ndarray, name: str) -> tuple[Weight, Weight]:
    """The update of the matrix `name` from float32 `[rank, in_features]` and `[out_features,
    rank]`, with zeros up to a rank that kernels compute eight at a time."""
    missing = -len(down) % 8
    down = np.pad(down, ((0, missing), (0, 0)))
    up = np.pad(up, ((0, 0), (0, missing)))
    return plain_weight(down, f"{name}.lora_A"), plain_weight(up, f"{name}.lora_B")
