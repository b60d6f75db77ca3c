"""Reads one layer of a drafter in the layout of Llama."""

from __future__ import annotations

from anydecode.kernels.interface import Attention
from anydecode.models.families.weights import TensorReader
from anydecode.models.network import GatedMlp, LayerWeights
from anydecode.models.spec import LayerSpec


def read_dense_layer(
    reader: TensorReader, name: str, spec: LayerSpec, hidden: int, inner: int, width: int
) -> LayerWeights:
    """The weights of a layer with attention and a gated MLP.

    Args:
        reader: The drafter's tensors.
        name: The layer's name.
        spec: Its architecture.
        hidden: The hidden size.
        inner: The inner size of the MLP.
        width: Numbers that queries, keys and values read.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    read, mlp = reader.linear, f"{name}.mlp"
    layer = read_attention(reader, name, spec, hidden, width)
    layer.mlp = GatedMlp(
        read(f"{mlp}.gate_proj", (inner, hidden), False),
        read(f"{mlp}.up_proj", (inner, hidden), False),
        read(f"{mlp}.down_proj", (hidden, inner), False),
    )
    layer.mlp_norm = reader.vector(f"{name}.post_attention_layernorm.weight", hidden)
    return layer


def read_attention(
    reader: TensorReader, name: str, spec: LayerSpec, hidden: int, width: int
) -> LayerWeights:
    """The weights of a layer with attention only; arguments and errors as for
    `read_dense_layer`."""
    shape, read = spec.attention, reader.linear
    assert isinstance(shape, Attention), "a layer with attention"
    size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = f"{name}.self_attn"
    layer = LayerWeights(
        query=read(f"{attention}.q_proj", (size, width), False),
        key=read(f"{attention}.k_proj", (kv_size, width), False),
        value=read(f"{attention}.v_proj", (kv_size, width), False),
        output=read(f"{attention}.o_proj", (hidden, size), False),
    )
    if spec.has_attention_norm:
        layer.attention_norm = reader.vector(f"{name}.input_layernorm.weight", hidden)
    if spec.qk_norm == "head":
        layer.query_norm, layer.key_norm = (
            reader.vector(f"{attention}.{part}_norm.weight", shape.head_dim) for part in ("q", "k")
        )
    return layer
