"""A matrix product with a bias and a factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.interface import Backend, Weight


@dataclass(eq=False)
class Linear:
    """A matrix and its bias (float32 `[out_features]`), if any; `scale` multiplies the result."""

    weight: Weight
    bias: np.ndarray | None = None
    scale: float = 1.0

    def apply(self, backend: Backend, x: Any) -> Any:
        """(x @ weight.T + bias) * scale"""
        y = backend.linear(x, self.weight, self.bias)
        return y if self.scale == 1.0 else backend.scale(y, self.scale)
