"""GEAR: keys or values as low-bit codes, a low-rank correction and a few exact outliers.

Kang et al., "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference
of LLM", arXiv:2403.05527.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Numbers per group; a group has one scale and one minimum.
GROUP = 64
_NUM_ITERATIONS = 3


@dataclass(frozen=True, eq=False)
class Compressed:
    """X `[rows, heads, head_dim]` as D + L + S.

    Attributes:
        quantised: D, dequantised, `[rows, heads, head_dim]`.
        left: The left factor of L, which is `left @ right.T` per head; `[heads, rows, rank]`.
        right: The right factor of L, `[heads, head_dim, rank]`.
        outliers: The mask of S in X and X itself, both `[rows, heads, head_dim]`.
        num_bytes: The compressed size: codes of `bits` bits, everything else as 16-bit numbers.
    """

    quantised: np.ndarray
    left: np.ndarray
    right: np.ndarray
    outliers: tuple[np.ndarray, np.ndarray]
    num_bytes: int

    def reconstruct(self) -> np.ndarray:
        """The approximation of X, float32 `[rows, heads, head_dim]`."""
        approximation = self.quantised + (self.left @ self.right.swapaxes(1, 2)).swapaxes(0, 1)
        mask, values = self.outliers
        return np.where(mask, values, approximation)


def quantise_groups(x: np.ndarray, bits: int, group: int = GROUP) -> tuple[np.ndarray, int]:
    """Quantise x `[vectors, length]` in groups of `group` neighbours, to 2^bits evenly spaced
    levels between the minimum and the maximum of the group.

    Returns:
        The dequantised x and the number of groups.
    """
    parts = []
    for start in range(0, x.shape[1], group):
        part = x[:, start : start + group]
        low, high = part.min(1, keepdims=True), part.max(1, keepdims=True)
        step = (high - low) / (2**bits - 1)
        codes = np.rint((part - low) / np.maximum(step, 1e-20))
        parts.append(codes * step + low)
    return np.concatenate(parts, 1), len(parts) * len(x)


def outlier_mask(x: np.ndarray, fraction: float) -> np.ndarray:
    """A mask of the largest and the smallest numbers of each vector of x `[vectors, length]`, each
    `fraction / 2` of the length; of equal numbers the first count as smaller."""
    count, mask = int(fraction / 2 * x.shape[1] + 0.5), np.zeros(x.shape, bool)
    if count:
        order = np.argsort(x, axis=1, kind="stable")
        np.put_along_axis(mask, order[:, :count], True, 1)
        np.put_along_axis(mask, order[:, -count:], True, 1)
    return mask


def low_rank_factors(x: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Low-rank factors of x `[heads, rows, columns]` by power iteration: left `[heads, rows, rank]`
    and right `[heads, columns, rank]`."""
    rank = min(rank, *x.shape[1:])
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


def compress(x: np.ndarray, *, keys: bool, bits: int, rank: int, sparse: float) -> Compressed:
    """Compress X `[rows, heads, head_dim]`: keys per channel, values per row.

    Outliers are replaced by the mean of their vector before quantisation; the low-rank part
    approximates the quantisation error.

    Args:
        x: Keys or values.
        keys: Whether x holds keys.
        bits: Bits per code.
        rank: Rank of the correction per head; 0 for none.
        sparse: The fraction of the numbers stored as outliers.
    """
    rows, heads, size = x.shape
    flat = x.astype(np.float32).reshape(rows, heads * size)
    vectors = flat.T if keys else flat
    mask = outlier_mask(vectors, sparse)
    filled = np.where(mask, vectors.mean(1, keepdims=True), vectors)
    codes, groups = quantise_groups(filled, bits)
    if keys:
        mask, codes, filled = mask.T, codes.T, filled.T
    shape = (rows, heads, size)
    residual = (filled - codes).reshape(shape)
    left, right = low_rank_factors(residual.swapaxes(0, 1), rank) if rank else (
        np.zeros((heads, rows, 0), np.float32), np.zeros((heads, size, 0), np.float32),
    )  # fmt: skip
    num_bytes = bits * x.size // 8 + 4 * groups + 2 * (left.size + right.size)
    num_bytes += 4 * int(mask.sum())
    outliers = (mask.reshape(shape), flat.reshape(shape))
    return Compressed(codes.reshape(shape), left, right, outliers, num_bytes)
