"""Biases of keys (Doge, Shi et al., arXiv:2412.11834): to the scores of a position a number is
added that its value gives for each key head. It is one more number of the key, which queries
multiply by 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.interface import Attention, Backend, Weight
from anydecode.models.linear import Linear


@dataclass(eq=False)
class KeyBias:
    """exp(rates * softplus(steps(v))), where v are the values of all heads of a position.

    Attributes:
        steps: `[num_kv_heads, num_kv_heads * value_dim]`.
        rates: Float32 `[num_kv_heads]`.
        ones: What queries multiply the biases by, `[1, num_heads]`.
    """

    steps: Linear
    rates: np.ndarray
    ones: Weight

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix of a product."""
        return self.steps.matrices

    def keys(self, backend: Backend, k: Any, v: Any, shape: Attention) -> Any:
        """The keys with the bias behind each; `k` has a number less per head."""
        bias = backend.activate(self.steps.apply(backend, v), "softplus")
        bias = backend.activate(backend.multiply(bias, self.rates), "exp")
        return backend.join(k, backend.scale(bias, 1.0 / shape.scale), shape.num_kv_heads)

    def queries(self, backend: Backend, q: Any, shape: Attention) -> Any:
        """The queries with a 1 behind each."""
        zeros = backend.scale(backend.columns(q, 0, shape.num_heads), 0.0)
        return backend.join(q, backend.add_positions(zeros, self.ones), shape.num_heads)
