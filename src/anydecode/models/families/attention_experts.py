"""Reads attention whose queries and outputs are those of experts (JetMoE)."""

from __future__ import annotations

from anydecode.kernels.formats import plain_weight
from anydecode.kernels.interface import Attention, Weight
from anydecode.models.attention_experts import AttentionExperts
from anydecode.models.families.values import Config, int_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import MAX_EXPERTS
from anydecode.models.linear import Linear
from anydecode.models.network import LayerWeights


def read_attention_experts(
    reader: TensorReader, config: Config, name: str, layer: LayerWeights, shape: Attention
) -> None:
    """Read the attention of the layer `name`: experts, and one matrix of keys and values."""
    hidden, count = (
        int_value(config, "hidden_size"),
        int_value(config, "num_local_experts", high=MAX_EXPERTS),
    )
    size, block = shape.num_kv_heads * shape.head_dim, f"{name}.self_attention.experts"

    def stack(kind: str, rows: int, columns: int) -> list[Weight]:
        parts = reader.stacked(f"{block}.{kind}.weight", (count, rows, columns))
        return [
            reader.convert(plain_weight(part), f"{block}.{kind}.{expert}")
            for expert, part in enumerate(parts)
        ]

    # A router is small, and quantising it would change which experts are selected.
    router = reader.matrix(f"{block}.router.layer", (count, hidden), keep_format=True)
    bias = plain_weight(reader.vector(f"{block}.bias", hidden)[None])
    layer.attention_experts = AttentionExperts(
        Linear(router),
        stack("input_linear", size, hidden),
        stack("output_linear", hidden, size),
        bias,
    )
    fused = f"{name}.self_attention.kv_proj"
    layer.key, layer.value = (
        reader.linear(fused, (2 * size, hidden), False, rows=rows, alias=f"{fused}.{part}")
        for part, rows in (("key", slice(0, size)), ("value", slice(size, 2 * size)))
    )
