"""Reads attention whose queries and keys are convolved (ZAYA1)."""

from __future__ import annotations

import numpy as np

from anydecode.kernels.formats import plain_weight
from anydecode.kernels.interface import Attention, Weight
from anydecode.models.convolved_attention import ConvolvedAttention
from anydecode.models.families.values import Config, bool_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.network import LayerWeights


def read_convolved_attention(
    reader: TensorReader, config: Config, layer: str, weights: LayerWeights, shape: Attention
) -> None:
    """Read the attention of the layer `layer`."""
    name, has_bias = f"{layer}.self_attn.qkv_proj", bool_value(config, "attention_bias")
    dim, heads = shape.head_dim, shape.num_heads + shape.num_kv_heads
    hidden = reader.shape(f"{name}.q_proj.weight")[1]
    size, kv_size, width = shape.num_heads * dim, shape.num_kv_heads * dim, heads * dim
    weights.query = reader.linear(f"{name}.q_proj", (size, hidden), has_bias)
    weights.key = reader.linear(f"{name}.k_proj", (kv_size, hidden), has_bias)
    half = kv_size // 2, hidden
    weights.value = reader.linear(f"{name}.v_proj_current", half, has_bias)
    weights.output = reader.linear(f"{layer}.self_attn.o_proj", (hidden, size), has_bias)
    first = reader.tensor(f"{name}.conv_qk_depthwise.weight", (width, 1, 2))
    second = reader.tensor(f"{name}.conv_qk_grouped.weight", (width, dim, 2))
    stacks = [second[..., tap].reshape(heads, dim, dim) for tap in (0, 1)]
    inner = reader.vector(f"{name}.conv_qk_depthwise.bias", width).reshape(heads, dim)
    bias = np.einsum("hij,hj->hi", stacks[0] + stacks[1], inner).ravel()
    bias = bias + reader.vector(f"{name}.conv_qk_grouped.bias", width)
    delayed = reader.linear(f"{name}.v_proj_delayed", half, has_bias)
    delayed_bias, delayed.bias = delayed.bias, None
    weights.convolved = ConvolvedAttention(
        delayed,
        np.ascontiguousarray(first[:, 0, 1]),
        np.ascontiguousarray(first[:, 0, 0]),
        _matrices(stacks[1]),
        _matrices(stacks[0]),
        plain_weight(bias[None]),
        np.repeat(reader.vector(f"{layer}.self_attn.qk_norm.temp", shape.num_kv_heads), dim),
        None if delayed_bias is None else plain_weight(delayed_bias[None]),
    )


def _matrices(stack: np.ndarray) -> list[Weight]:
    """The matrices of heads, which keep float32: they are small."""
    return [plain_weight(np.ascontiguousarray(part)) for part in stack]
