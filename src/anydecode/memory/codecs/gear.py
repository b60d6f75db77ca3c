"""GEAR: keys or values as low-bit codes, a low-rank correction and a few exact outliers.

Kang et al., "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference
of LLM", arXiv:2403.05527.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Numbers per group; a group has one scale and one minimum.
GROUP = 64
_NUM_ITERATIONS = 3


@dataclass(frozen=True)
class GearBlock:
    """The compressed form of keys or values X `[rows, heads, head_dim]`: X is about D + L + S.

    D are `bits`-bit codes, with a scale and a minimum per group of 64 neighbours of a vector; the
    vectors are channels of keys and rows of values. L is a product of two matrices per head, and
    approximates the error of D. S are the largest and the smallest numbers of each vector. All
    numbers but codes and indices have the dtype of X.

    Attributes:
        rows, heads, head_dim: The shape of X.
        keys: Whether X are keys.
        bits: Bits per code, 1 to 8.
        rank: The rank of L.
        sparse: The share of the numbers that S holds.
        dtype: The dtype of X.
    """

    rows: int
    heads: int
    head_dim: int
    keys: bool
    bits: int
    rank: int
    sparse: float
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of the compressed form."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._layout)

    def encode(self, x: np.ndarray) -> np.ndarray:
        """The compressed form, uint8 `[num_bytes]`, of X.

        Outliers are replaced by the mean of their vector before quantisation.
        """
        vectors = self._vectors(x.astype(np.float32))
        outliers = outlier_indices(vectors, self._num_outliers)
        exact = np.take_along_axis(vectors, outliers, 1)
        filled = vectors.copy()
        np.put_along_axis(filled, outliers, vectors.mean(1, keepdims=True), 1)
        scales, minima = (numbers.astype(self.dtype) for numbers in group_ranges(filled, self.bits))
        codes = quantise(filled, scales, minima, self.bits)
        residual = self._rows(filled - dequantise(codes, scales, minima))
        left, right = low_rank_factors(residual.swapaxes(0, 1), self._rank)
        parts = (_bit_planes(codes, self.bits), scales, minima, left, right, outliers, exact)
        return np.concatenate(
            [
                np.ascontiguousarray(part.astype(dtype)).reshape(-1).view(np.uint8)
                for part, (dtype, _) in zip(parts, self._layout, strict=True)
            ]
        )

    def decode(self, data: np.ndarray) -> np.ndarray:
        """The approximation of X, `[rows, heads, head_dim]` of its dtype, from its compressed form,
        uint8 `[num_bytes]`."""
        parts, start = [], 0
        for dtype, shape in self._layout:
            stop = start + dtype.itemsize * math.prod(shape)
            parts.append(data[start:stop].copy().view(dtype).reshape(shape))
            start = stop
        planes, scales, minima, left, right, outliers, exact = parts
        codes = _from_bit_planes(planes, self._vectors_shape)
        left, right = left.astype(np.float32), right.astype(np.float32)
        low_rank = (left @ right.swapaxes(1, 2)).swapaxes(0, 1)
        vectors = dequantise(codes, scales, minima) + self._vectors(low_rank)
        np.put_along_axis(vectors, outliers.astype(np.int64), exact.astype(np.float32), 1)
        return self._rows(vectors).astype(self.dtype)

    @property
    def _vectors_shape(self) -> tuple[int, int]:
        """How many vectors there are, and how many numbers each has."""
        channels = self.heads * self.head_dim
        return (channels, self.rows) if self.keys else (self.rows, channels)

    @property
    def _num_outliers(self) -> int:
        """Outliers of each vector on either side."""
        return int(self.sparse / 2 * self._vectors_shape[1] + 0.5)

    @property
    def _rank(self) -> int:
        return min(self.rank, self.rows, self.head_dim)

    @property
    def _layout(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """The dtype and the shape of each part of the compressed form."""
        count, length = self._vectors_shape
        groups, outliers = (count, -(-length // GROUP)), (count, 2 * self._num_outliers)
        planes = self.bits, -(-count * length // 8)
        return [
            (np.dtype(np.uint8), planes),
            (self.dtype, groups),
            (self.dtype, groups),
            (self.dtype, (self.heads, self.rows, self._rank)),
            (self.dtype, (self.heads, self.head_dim, self._rank)),
            (np.min_scalar_type(length - 1), outliers),
            (self.dtype, outliers),
        ]

    def _vectors(self, x: np.ndarray) -> np.ndarray:
        """Rows `[rows, heads, head_dim]` as vectors."""
        flat = x.reshape(self.rows, -1)
        return flat.T if self.keys else flat

    def _rows(self, vectors: np.ndarray) -> np.ndarray:
        """Vectors as rows `[rows, heads, head_dim]`."""
        flat = vectors.T if self.keys else vectors
        return flat.reshape(self.rows, self.heads, self.head_dim)


def group_ranges(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The step between two of 2^bits levels, and the minimum, of each group of `GROUP` neighbours
    of x `[vectors, length]`; both `[vectors, groups]`."""
    starts = np.arange(0, x.shape[1], GROUP)
    minima, maxima = np.minimum.reduceat(x, starts, 1), np.maximum.reduceat(x, starts, 1)
    return (maxima - minima) / np.float32(2**bits - 1), minima


def quantise(x: np.ndarray, scales: np.ndarray, minima: np.ndarray, bits: int) -> np.ndarray:
    """The nearest levels of x `[vectors, length]`, uint8, with the scales and minima of groups."""
    scale, low = _per_number(scales, x.shape[1]), _per_number(minima, x.shape[1])
    levels = np.rint((x - low) / np.maximum(scale, np.float32(1e-20)))
    return levels.clip(0, 2**bits - 1).astype(np.uint8)


def dequantise(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """The numbers that the codes `[vectors, length]` stand for, float32."""
    length = codes.shape[1]
    return codes * _per_number(scales, length) + _per_number(minima, length)


def _per_number(groups: np.ndarray, length: int) -> np.ndarray:
    """A number per group as one for each of the vector's numbers, float32 `[vectors, length]`."""
    return groups.astype(np.float32).repeat(GROUP, 1)[:, :length]


def outlier_indices(x: np.ndarray, count: int) -> np.ndarray:
    """The indices of the `count` smallest and the `count` largest numbers of each vector of x
    `[vectors, length]`, `[vectors, 2 * count]`; of equal numbers the first count as smaller."""
    order = np.argsort(x, axis=1, kind="stable")
    return np.concatenate([order[:, :count], order[:, order.shape[1] - count :]], 1)


def low_rank_factors(x: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Low-rank factors of x `[heads, rows, columns]` by power iteration: left `[heads, rows, rank]`
    and right `[heads, columns, rank]`."""
    random = np.random.default_rng(0)
    right = random.standard_normal((x.shape[0], x.shape[2], rank), np.float32)
    left = x @ right
    for number in range(_NUM_ITERATIONS):
        if number == _NUM_ITERATIONS - 1:
            right = np.linalg.qr(right).Q
        left = x @ right
        if number == _NUM_ITERATIONS - 1:
            left = np.linalg.qr(left).Q
        right = x.swapaxes(1, 2) @ left
    return left, right


def _bit_planes(codes: np.ndarray, bits: int) -> np.ndarray:
    """The lowest bit of all codes, then the next one, ..., uint8 `[bits, ceil(codes / 8)]`."""
    flat = codes.reshape(-1)
    return np.packbits([(flat >> bit) & 1 for bit in range(bits)], axis=1)


def _from_bit_planes(planes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The codes of `_bit_planes`, uint8, in their shape."""
    count = math.prod(shape)
    codes = np.zeros(count, np.uint8)
    for bit, plane in enumerate(planes):
        codes |= np.unpackbits(plane, count=count) << bit
    return codes.reshape(shape)
