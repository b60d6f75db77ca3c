"""Differential attention (Ye et al., "Differential Transformer", arXiv:2410.05258).

Heads 2i and 2i + 1 are a pair. Both attend to the values of a pair of heads, side by side, and the
second one's output, times a factor, is subtracted from the first one's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.interface import Attention, Backend

#: Epsilon of the norm of a pair's output in Phi-4-mini-flash.
NORM_EPS = 1e-5


@dataclass(eq=False)
class DifferentialWeights:
    """The weights of one layer's differential attention.

    The keys of a pair of heads are one key of the kernels, and so are their values. So each is
    stored once. A query is that of its head, and zeros beside the other head's key.

    Attributes:
        factor: Of the second head's output.
        norm: Of the difference, float32 `[head_dim]`, times the constant that scales it.
        norm_eps: Of that norm.
    """

    factor: float
    norm: np.ndarray
    norm_eps: float

    def queries(self, backend: Backend, q: Any, shape: Attention) -> Any:
        """The queries of the kernels, `[rows, num_heads * head_dim]`, from half as many numbers."""
        pairs = shape.num_heads // 2
        first, second = backend.split(q, shape.head_dim // 2, pairs)
        zeros = backend.scale(first, 0.0)
        first = backend.join(first, zeros, pairs)
        return backend.join(first, backend.join(zeros, second, pairs), pairs)

    def combine(self, backend: Backend, y: Any, shape: Attention) -> Any:
        """The normed differences of pairs, `[rows, num_heads * head_dim / 2]`."""
        pairs = shape.num_heads // 2
        first, second = backend.split(y, shape.head_dim, pairs)
        y = backend.add(first, backend.scale(second, -self.factor))
        return backend.rms_norm(y, self.norm, self.norm_eps, pairs)
