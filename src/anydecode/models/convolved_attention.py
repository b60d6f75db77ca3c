"""Attention whose queries and keys are convolved (compressed convolutional attention; Figliolia et
al., arXiv:2510.04476).

Queries and keys of a position and of the two before it are mixed, number by number and then within
each head. The mean of a key and of each query that attends to it is added to the query, and the
mean of these to the key. Both are divided by their norms, and keys have a factor for each head. The
last half of the values is that of the position before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.interface import Attention, Backend, Recurrence, Weight
from anydecode.models.linear import Linear

#: The norms of queries and keys are at least that large.
_MIN_NORM = float(np.finfo(np.float32).eps)


@dataclass(eq=False)
class ConvolvedAttention:
    """The weights beside those of `LayerWeights`, of which `value` gives the first half of the
    values.

    Attributes:
        delayed: Of the last half of the values, `[num_kv_heads * head_dim / 2, hidden_size]`.
        delayed_bias: Its bias, `[1, num_kv_heads * head_dim / 2]`, if it has one.
        own: Factors of the numbers of queries and keys at a position, float32 `[width]`.
        before: Of those at the position before.
        mixes: One matrix per head, `[head_dim, head_dim]`, of what these give together.
        mixes_before: Of the same at the position before.
        bias: Of the products of both, `[1, width]`.
        key_factors: Float32 `[num_kv_heads * head_dim]`.
    """

    delayed: Linear
    own: np.ndarray
    before: np.ndarray
    mixes: list[Weight]
    mixes_before: list[Weight]
    bias: Weight
    key_factors: np.ndarray
    delayed_bias: Weight | None = None

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix of a product."""
        return [*self.delayed.matrices, *self.mixes, *self.mixes_before]

    def queries_keys(
        self, backend: Backend, q: Any, k: Any, layer: int, shape: Attention, stored: Recurrence
    ) -> tuple[Any, Any]:
        """The queries and keys without positions, from the products of their matrices."""
        size, width = shape.num_heads * shape.head_dim, len(self.own)
        x = backend.join(q, k)
        ones = np.ones(width, np.float32)
        (before,) = backend.shift(x, layer, stored, 0, [ones])
        x = backend.add(backend.multiply(x, self.own), backend.multiply(before, self.before))
        (before,) = backend.shift(x, layer, stored, width, [ones])
        y = backend.add(
            backend.grouped_linear(x, self.mixes),
            backend.grouped_linear(before, self.mixes_before),
        )
        y = backend.add_positions(y, self.bias)
        means, mean = _means(backend, q, k, shape)
        q = backend.add(backend.columns(y, 0, size), means)
        k = backend.add(backend.columns(y, size, width - size), mean)
        eps = _MIN_NORM**2 / shape.head_dim
        q = backend.rms_norm(q, None, eps, shape.num_heads)
        k = backend.rms_norm(k, None, eps, shape.num_kv_heads)
        return q, backend.multiply(k, self.key_factors)

    def values(self, backend: Backend, v: Any, x: Any, layer: int, stored: Recurrence) -> Any:
        """The values for the normed inputs x of the layer, of which v is the first half."""
        ones = np.ones(self.delayed.weight.out_features, np.float32)
        y = self.delayed.apply(backend, x)
        (y,) = backend.shift(y, layer, stored, 2 * len(self.own), [ones])
        y = y if self.delayed_bias is None else backend.add_positions(y, self.delayed_bias)
        return backend.join(v, y)


def _means(backend: Backend, q: Any, k: Any, shape: Attention) -> tuple[Any, Any]:
    """The means of queries and their keys, and the means of these of each key head."""
    count, dim, heads = shape.num_heads // shape.num_kv_heads, shape.head_dim, shape.num_kv_heads
    parts, rest = [], q
    for _ in range(count - 1):
        part, rest = backend.split(rest, dim, heads)
        parts.append(part)
    parts = [backend.scale(backend.add(part, k), 0.5) for part in (*parts, rest)]
    means = total = parts[0]
    for part in parts[1:]:
        means, total = backend.join(means, part, heads), backend.add(total, part)
    return means, backend.scale(total, 1.0 / count)
