"""Learned biases of attention by the distance of key and row (Raffel et al., T5, arXiv:1910.10683),
as MPNet has them: small distances have one each, larger ones share one by their logarithm."""

from __future__ import annotations

import numpy as np

from anydecode.models.families.values import Config, int_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import refusal

#: All larger distances have the bias of this one.
BIAS_REACH = 128


_BUCKETS, _HALF, _EXACT = 32, 16, 8


def read_distance_biases(reader: TensorReader, config: Config, num_heads: int) -> np.ndarray:
    """The bias of each head and distance, float32 `[num_heads, 2 * BIAS_REACH + 1]`."""
    key = "relative_attention_num_buckets"
    if int_value(config, key, _BUCKETS) != _BUCKETS:
        raise refusal(key, config[key], f"{_BUCKETS}, as in the published code")
    stored = reader.tensor("relative_attention_bias.weight", (_BUCKETS, num_heads))
    return np.ascontiguousarray(stored[_buckets()].T)


def _buckets() -> np.ndarray:
    """The bucket of each distance from -BIAS_REACH to BIAS_REACH: half of them are of keys behind
    the row, half of each half of single distances."""
    distances = np.arange(-BIAS_REACH, BIAS_REACH + 1)
    sizes = np.abs(distances)
    # Two buckets for each doubling of the size, found by its square, which has no rounding.
    squares = np.array([_EXACT**2 << k for k in range(1, _HALF - _EXACT)])
    large = _EXACT + np.searchsorted(squares, sizes**2, side="right")
    found = np.where(sizes < _EXACT, sizes, large)
    result: np.ndarray = found + np.where(distances > 0, _HALF, 0)
    return result
