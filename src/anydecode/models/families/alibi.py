"""Linear biases of attention (ALiBi, Press et al., arXiv:2108.12409)."""

from __future__ import annotations


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """The slope of each head: 2^(-max_bias * i / n) for i from 1 to n, the largest power of two in
    `num_heads`; then the odd ones of those of 2n heads."""
    count = 1 << num_heads.bit_length() - 1
    slopes = [2.0 ** (-max_bias * i / count) for i in range(1, count + 1)]
    odd = [2.0 ** (-max_bias * i / (2 * count)) for i in range(1, 2 * count, 2)]
    return (*slopes, *odd)[:num_heads]
