"""Reads the relative positions of disentangled attention (DeBERTa, He et al., arXiv:2006.03654; its
second and third version, arXiv:2111.09543).

All layers share the embeddings of relative positions; each has its own keys and queries of them, by
the matrices that make those of tokens. They do not depend on the text, and are computed here.
"""

from __future__ import annotations

import numpy as np

from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Attention, RelativePositions
from anydecode.models.families.values import Config, int_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import MAX_COUNT, number
from anydecode.models.linear import Linear
from anydecode.models.network import LayerWeights


def read_relative_positions(
    reader: TensorReader,
    config: Config,
    weights: LayerWeights,
    shape: Attention,
    max_positions: int,
) -> RelativePositions:
    """Those of one layer, of which queries and keys have been read into `weights`.

    Args:
        reader: The checkpoint's tensors.
        config: The config.
        weights: The layer's weights.
        shape: The layer's attention.
        max_positions: The context length.
    """
    span, hidden = (
        int_value(config, "position_buckets", high=MAX_COUNT),
        int_value(config, "hidden_size"),
    )
    table = reader.tensor("relative_positions.weight", (2 * span, hidden))
    if reader.has("relative_norm.weight"):
        norm, bias = (reader.vector(f"relative_norm.{x}", hidden) for x in ("weight", "bias"))
        eps = number("layer_norm_eps", config.get("layer_norm_eps"), 0.0, 1.0)
        centered = table - table.mean(-1, keepdims=True)
        deviation = np.sqrt((centered**2).mean(-1, keepdims=True) + np.float32(eps))
        table = centered / deviation * norm + bias
    assert weights.query is not None and weights.key is not None
    longest = int_value(config, "max_relative_positions", -1, low=-1)
    if longest < 1:
        longest = int_value(config, "max_position_embeddings")
    keys, queries = (_products(table, one, shape) for one in (weights.key, weights.query))
    return RelativePositions(_columns(max_positions - 1, span, longest), keys, queries)


def _products(table: np.ndarray, linear: Linear, shape: Attention) -> np.ndarray:
    """The product of every relative position, float32 `[num_heads, positions, head_dim]`."""
    products = table @ dequantize(linear.weight).T
    if linear.bias is not None:
        products = products + linear.bias
    heads = products.reshape(len(table), shape.num_heads, shape.head_dim).swapaxes(0, 1)
    return np.ascontiguousarray(heads, np.float32)


def _columns(reach: int, span: int, longest: int) -> np.ndarray:
    """The relative position of each distance from -reach to reach of a key behind its row: single
    distances up to half of `span`, then buckets by their logarithm, up to `longest`."""
    reach = max(reach, 1)
    distance = -np.arange(-reach, reach + 1)  # of the row behind the key
    middle, size = span // 2, np.abs(distance)
    large = np.maximum(size, max(middle, 1)).astype(np.float32)
    logarithm = np.log(large / np.float32(middle)) / np.log(np.float32((longest - 1) / middle))
    buckets = np.ceil(logarithm * np.float32(middle - 1)) + middle
    found = np.where(size <= middle, distance, buckets * np.sign(distance)).astype(np.int64)
    result: np.ndarray = np.clip(found + span, 0, 2 * span - 1)
    return result
