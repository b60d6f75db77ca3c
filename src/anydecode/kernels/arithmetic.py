"""Operations of the reference backend in numpy, for single rows outside a pass: sums are bit-equal;
square roots and matrix products round as in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anydecode.kernels.formats import dequantize, dequantize_rows
from anydecode.kernels.interface import Rope, Weight


def tree_sum(x: np.ndarray) -> np.ndarray:
    """The sum over the last axis: the second half is added to the first until one entry is left."""
    size = x.shape[-1]
    while size > 1:
        half = size // 2
        summed = x[..., :half] + x[..., half : 2 * half]
        if size % 2:
            summed = np.concatenate((summed, x[..., size - 1 : size]), -1)
        x, size = summed, half + size % 2
    return x[..., 0]


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in the dtype of x."""
    weights = np.exp(x - x.max(-1, keepdims=True))
    result: np.ndarray = weights / weights.sum(-1, keepdims=True)
    return result


class RowArithmetic:
    """The operations of `Backend` that do not read the cache, on float32 `[rows, width]`.

    Args:
        positions: int `[rows]`, the position of each row, for `rope` and `add_positions`.
    """

    def __init__(self, positions: np.ndarray | None = None) -> None:
        self._positions = positions

    def rms_norm(
        self, x: np.ndarray, weight: np.ndarray | None, eps: float, groups: int = 1
    ) -> np.ndarray:
        """See `Backend.rms_norm`."""
        parts = x.reshape(len(x), groups, x.shape[-1] // groups)
        mean = tree_sum(parts * parts)[..., None] / np.float32(parts.shape[-1])
        parts = parts / np.sqrt(mean + np.float32(eps))
        if weight is not None:
            parts = parts * (weight.reshape(groups, -1) if weight.size == x.shape[-1] else weight)
        return parts.reshape(x.shape)

    def layer_norm(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None,
        eps: float,
        groups: int = 1,
    ) -> np.ndarray:
        """See `Backend.layer_norm`."""
        parts = x.reshape(len(x), groups, x.shape[-1] // groups)
        width = np.float32(parts.shape[-1])
        centred = parts - tree_sum(parts)[..., None] / width
        variance = tree_sum(centred * centred)[..., None] / width
        normed = centred / np.sqrt(variance + np.float32(eps))
        y: np.ndarray = normed.reshape(x.shape) * weight
        return y if bias is None else y + bias

    def add_positions(self, x: np.ndarray, table: Weight) -> np.ndarray:
        """See `Backend.add_positions`."""
        assert self._positions is not None
        return x + dequantize_rows(table, np.minimum(self._positions, table.out_features - 1))

    def linear(self, x: np.ndarray, weight: Weight, bias: np.ndarray | None = None) -> np.ndarray:
        """x @ weight.T + bias, without adapters."""
        y: np.ndarray = x @ dequantize(weight).T
        return y if bias is None else y + bias

    def grouped_linear(self, x: np.ndarray, weights: Sequence[Weight]) -> np.ndarray:
        """See `Backend.grouped_linear`; without adapters."""
        parts = np.split(x, len(weights), -1)
        products = [self.linear(part, w) for part, w in zip(parts, weights, strict=True)]
        return np.concatenate(products, -1)

    def split(self, x: np.ndarray, size: int, groups: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """See `Backend.split`."""
        parts = x.reshape(len(x), groups, x.shape[-1] // groups)
        first, rest = np.split(parts, [size], -1)
        count = groups * size
        return first.reshape(len(x), count), rest.reshape(len(x), x.shape[-1] - count)

    def join(self, x: np.ndarray, y: np.ndarray, groups: int = 1) -> np.ndarray:
        """See `Backend.join`."""
        parts = [z.reshape(len(z), groups, z.shape[-1] // groups) for z in (x, y)]
        return np.concatenate(parts, -1).reshape(len(x), x.shape[-1] + y.shape[-1])

    def columns(self, x: np.ndarray, first: int, size: int) -> np.ndarray:
        """See `Backend.columns`."""
        return x[:, first : first + size]

    def clamp(self, x: np.ndarray, limit: float) -> np.ndarray:
        """See `Backend.clamp`."""
        return x.clip(-np.float32(limit), np.float32(limit))

    def rope(self, x: np.ndarray, num_heads: int, rope: Rope) -> np.ndarray:
        """See `Backend.rope`."""
        assert self._positions is not None
        angles = self._positions.astype(np.float32)[:, None] * rope.frequencies
        steps = (self._positions + rope.growth_start) // rope.growth_period
        growth = rope.growth * np.log1p(steps)
        factors = (rope.factor * (1.0 + growth)).astype(np.float32)[:, None]
        cos, sin = (
            function(angles.astype(np.float64)).astype(np.float32) * factors
            for function in (np.cos, np.sin)
        )
        cos, sin, half = cos[:, None, :], sin[:, None, :], cos.shape[1]
        heads = x.reshape(len(x), num_heads, x.shape[-1] // num_heads)
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        parts: tuple[Any, ...] = (first * cos - second * sin, second * cos + first * sin, rest)
        return np.concatenate(parts, -1).reshape(x.shape)
