"""GEAR: keys or values as low-bit codes, a low-rank correction and a few exact outliers.

Kang et al., "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference
of LLM", arXiv:2403.05527.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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

    quantised: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    outliers: tuple[torch.Tensor, torch.Tensor]
    num_bytes: int

    def reconstruct(self) -> torch.Tensor:
        """The approximation of X, float32 `[rows, heads, head_dim]`."""
        approximation = self.quantised + torch.einsum("hnr,hdr->nhd", self.left, self.right)
        mask, values = self.outliers
        return torch.where(mask, values, approximation)


def quantise_groups(x: torch.Tensor, bits: int, group: int = GROUP) -> tuple[torch.Tensor, int]:
    """Quantise x `[vectors, length]` in groups of `group` neighbours, to 2^bits evenly spaced
    levels between the minimum and the maximum of the group.

    Returns:
        The dequantised x and the number of groups.
    """
    parts = []
    for part in torch.split(x, group, 1):
        low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
        step = (high - low) / (2**bits - 1)
        codes = ((part - low) / step.clamp_min(1e-20)).round()
        parts.append(codes * step + low)
    return torch.cat(parts, 1), len(parts) * len(x)


def outlier_mask(x: torch.Tensor, fraction: float) -> torch.Tensor:
    """A mask of the largest and the smallest numbers of each vector of x `[vectors, length]`, each
    `fraction / 2` of the length; of equal numbers the first count as smaller."""
    count, mask = int(fraction / 2 * x.shape[1] + 0.5), torch.zeros_like(x, dtype=torch.bool)
    if count:
        order = torch.sort(x, dim=1, stable=True).indices
        mask.scatter_(1, order[:, :count], True)
        mask.scatter_(1, order[:, -count:], True)
    return mask


def low_rank_factors(x: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Low-rank factors of x `[heads, rows, columns]` by power iteration: left `[heads, rows, rank]`
    and right `[heads, columns, rank]`."""
    rank = min(rank, *x.shape[1:])
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(x.shape[0], x.shape[2], rank, generator=generator)
    left = x @ right
    for number in range(_NUM_ITERATIONS):
        if number == _NUM_ITERATIONS - 1:
            right = torch.linalg.qr(right).Q
        left = x @ right
        if number == _NUM_ITERATIONS - 1:
            left = torch.linalg.qr(left).Q
        right = x.transpose(1, 2) @ left
    return left, right


def compress(x: torch.Tensor, *, keys: bool, bits: int, rank: int, sparse: float) -> Compressed:
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
    flat = x.float().reshape(rows, heads * size)
    vectors = flat.T if keys else flat
    mask = outlier_mask(vectors, sparse)
    filled = torch.where(mask, vectors.mean(1, keepdim=True), vectors)
    codes, groups = quantise_groups(filled, bits)
    if keys:
        mask, codes, filled = mask.T, codes.T, filled.T
    shape = (rows, heads, size)
    residual = (filled - codes).reshape(shape)
    left, right = low_rank_factors(residual.transpose(0, 1), rank) if rank else (
        torch.zeros(heads, rows, 0), torch.zeros(heads, size, 0),
    )  # fmt: skip
    num_bytes = bits * x.numel() // 8 + 4 * groups + 2 * (left.numel() + right.numel())
    num_bytes += 4 * int(mask.sum())
    outliers = (mask.reshape(shape), flat.reshape(shape))
    return Compressed(codes.reshape(shape), left, right, outliers, num_bytes)
