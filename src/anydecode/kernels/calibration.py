"""The inputs of a model's matrices, summed up while the torch reference runs it."""

from __future__ import annotations

import numpy as np
import torch

from anydecode.kernels.interface import Weight
from anydecode.kernels.reference import ReferenceBackend


class CalibrationBackend(ReferenceBackend):
    """Accumulates the Hessian of each matrix of a model's layers, up to a factor: the sum of x xᵀ
    over all inputs x."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[str, torch.Tensor] = {}

    @property
    def hessians(self) -> dict[str, np.ndarray]:
        """By the name of the matrix: float64 `[in_features, in_features]`."""
        return {name: total.numpy() for name, total in self._sums.items()}

    def linear(
        self, x: torch.Tensor, weight: Weight, bias: np.ndarray | None = None
    ) -> torch.Tensor:
        if ".layers." in weight.name:
            rows = x.double()
            self._sums[weight.name] = self._sums.get(weight.name, 0) + rows.T @ rows
        return super().linear(x, weight, bias)


class SquaresBackend(ReferenceBackend):
    """Accumulates the squares of the inputs of each matrix of a model's layers.

    Attributes:
        squares: By the name of the matrix: the sums of squares, float64 `[in_features]`, and the
            number of inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.squares: dict[str, tuple[np.ndarray, int]] = {}

    def _linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: np.ndarray | None,
        adapters: np.ndarray | None,
    ) -> torch.Tensor:
        if ".layers." in weight.name:
            rows = x.double().reshape(-1, x.shape[-1])
            total, count = self.squares.get(weight.name, (0.0, 0))
            added = (rows * rows).sum(0).numpy()
            self.squares[weight.name] = total + added, count + len(rows)
        return super()._linear(x, weight, bias, adapters)
