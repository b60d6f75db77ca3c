"""Linear biases of attention (ALiBi, Press et al., arXiv:2108.12409)."""

from __future__ import annotations

import numpy as np

from anydecode.kernels import portable


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """The slope of each head: 2^(-max_bias * i / n) for i from 1 to n, the largest power of two in
    `num_heads`; then the odd ones of those of 2n heads."""
    count = 1 << num_heads.bit_length() - 1
    steps = [*range(2, 2 * count + 1, 2), *range(1, 2 * count, 2)][:num_heads]
    slopes = portable.power(2.0, np.array(steps) * (-max_bias / (2 * count)))
    return tuple(slopes.astype(np.float32).tolist())
