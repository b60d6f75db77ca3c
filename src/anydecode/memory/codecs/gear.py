"""Keys or values as few bits, a low-rank correction and a few exact outliers.

Kang et al., "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference
of LLM", arXiv:2403.05527.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Numbers that share a scale and a minimum.
GROUP = 64
_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Compressed:
    """X `[rows, heads, head_dim]` as D + L + S. `quantised` is D; `left @ right.T` is L per head,
    `[heads, rows, rank]` and `[heads, head_dim, rank]`; `outliers` are the places of S in X and
    their values. `num_bytes` counts codes of `bits`, and everything else as 16-bit numbers."""

    quantised: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    outliers: tuple[torch.Tensor, torch.Tensor]
    num_bytes: int

    def restored(self) -> torch.Tensor:
        """X as it is seen again, float32."""
        found = self.quantised + torch.einsum("hnr,hdr->nhd", self.left, self.right)
        mask, values = self.outliers
        return torch.where(mask, values, found)


def quantised(x: torch.Tensor, bits: int, group: int = GROUP) -> tuple[torch.Tensor, int]:
    """x `[vectors, length]`, each vector in groups of `group` neighbours as 2^bits evenly spaced
    levels from its least to its largest number; and how many groups there are."""
    parts = []
    for part in torch.split(x, group, 1):
        low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
        step = (high - low) / (2**bits - 1)
        codes = ((part - low) / step.clamp_min(1e-20)).round()
        parts.append(codes * step + low)
    return torch.cat(parts, 1), len(parts) * len(x)


def extremes(x: torch.Tensor, share: float) -> torch.Tensor:
    """The `share / 2` largest and as many smallest of each vector of x `[vectors, length]`, as a
    mask; ties to the first."""
    count, mask = int(share / 2 * x.shape[1] + 0.5), torch.zeros_like(x, dtype=torch.bool)
    if count:
        order = torch.sort(x, dim=1, stable=True).indices
        mask.scatter_(1, order[:, :count], True)
        mask.scatter_(1, order[:, -count:], True)
    return mask


def low_rank(x: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[heads, rows, columns]` by power iteration: left `[heads, rows, rank]` and right."""
    rank = min(rank, *x.shape[1:])
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(x.shape[0], x.shape[2], rank, generator=generator)
    left = x @ right
    for number in range(_ROUNDS):
        if number == _ROUNDS - 1:
            right = torch.linalg.qr(right).Q
        left = x @ right
        if number == _ROUNDS - 1:
            left = torch.linalg.qr(left).Q
        right = x.transpose(1, 2) @ left
    return left, right


def compressed(x: torch.Tensor, *, keys: bool, bits: int, rank: int, sparse: float) -> Compressed:
    """X `[rows, heads, head_dim]`: keys go channel by channel, values row by row. Outliers leave
    their vector's mean behind; the low-rank part corrects what quantisation changed."""
    rows, heads, size = x.shape
    flat = x.float().reshape(rows, heads * size)
    vectors = flat.T if keys else flat
    mask = extremes(vectors, sparse)
    filled = torch.where(mask, vectors.mean(1, keepdim=True), vectors)
    codes, groups = quantised(filled, bits)
    if keys:
        mask, codes, filled = mask.T, codes.T, filled.T
    shape = (rows, heads, size)
    residual = (filled - codes).reshape(shape)
    left, right = low_rank(residual.transpose(0, 1), rank) if rank else (
        torch.zeros(heads, rows, 0), torch.zeros(heads, size, 0),
    )  # fmt: skip
    taken = bits * x.numel() // 8 + 4 * groups + 2 * (left.numel() + right.numel())
    taken += 4 * int(mask.sum())
    outliers = (mask.reshape(shape), flat.reshape(shape))
    return Compressed(codes.reshape(shape), left, right, outliers, taken)
