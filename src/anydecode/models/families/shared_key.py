"""Reads attention whose heads share one key (DeepSeek-V4), and hyper-connections."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from anydecode.kernels.formats import plain_weight
from anydecode.kernels.interface import Attention, Rope
from anydecode.models.families.latent import read_low_rank_query
from anydecode.models.families.values import Config, int_value, list_value, mapping_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.hyper import HyperWeights
from anydecode.models.limits import MAX_COUNT, MAX_TOKENS, refusal
from anydecode.models.linear import Linear
from anydecode.models.network import IndexerWeights, LayerWeights
from anydecode.models.shared_key import EntryWeights, SharedKeyWeights
from anydecode.models.spec import IndexerSpec, LayerSpec, ModelSpec, SharedKeySpec
from anydecode.models.streams import Sublayers

#: The kinds of layers by the names of `transformers`: without entries, with entries of which an
#: indexer selects some, and with entries that rows all attend to.
SLIDING, SELECTED, ALL = KINDS = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


def shared_key_spec(
    config: Config, layer: int, rope: Rope
) -> tuple[Attention, SharedKeySpec, IndexerSpec | None]:
    """The attention of a layer. `entry_kinds` of the config has its kind, `compress_rates` how many
    positions an entry stands for."""
    kinds = list_value(config, "entry_kinds", str) or []
    kind = kinds[layer] if layer < len(kinds) else None
    if kind not in KINDS:
        raise refusal(f"layer_types[{layer}]", kind, f"one of {KINDS}")
    dim = int_value(config, "head_dim", high=MAX_COUNT)
    int_value(config, "num_key_value_heads", 1, high=1)
    shape = Attention(
        num_heads=int_value(config, "num_attention_heads", high=MAX_COUNT),
        num_kv_heads=1,
        head_dim=dim,
        scale=dim**-0.5,
        window=int_value(config, "sliding_window"),
        latent_dim=dim,
    )
    own = SharedKeySpec(
        int_value(config, "o_groups", high=MAX_COUNT),
        int_value(config, "o_lora_rank", high=MAX_COUNT),
        replace(rope, frequencies=-rope.frequencies),
    )
    if kind == SLIDING:
        return shape, own, None
    size = int_value(mapping_value(config, "compress_rates"), kind)
    own = replace(own, entry_rope=replace(rope, shift=1 - size), has_overlap=kind == SELECTED)
    shape = replace(shape, entry_size=size)
    if kind == ALL:
        return shape, own, None
    heads = int_value(config, "index_n_heads", high=MAX_COUNT)
    dim = int_value(config, "index_head_dim", high=MAX_COUNT)
    top_k = int_value(config, "index_topk", high=MAX_TOKENS)
    return replace(shape, top_k=top_k, index_dim=dim), own, IndexerSpec(heads, dim)


def read_shared_key(
    reader: TensorReader, spec: LayerSpec, layer: str, weights: LayerWeights, model: ModelSpec
) -> None:
    """Read the attention of one layer into `weights`.

    Args:
        reader: The checkpoint's tensors.
        spec: The layer's architecture, which has a shared key.
        layer: The layer's name.
        weights: Where to put them.
        model: The model's architecture.
    """
    shape, own, name, hidden = (
        spec.attention,
        spec.shared_key,
        f"{layer}.self_attn",
        model.hidden_size,
    )
    assert shape is not None and own is not None
    modules = tuple(f"{name}.{part}" for part in ("q_a_proj", "q_a_norm", "q_b_proj"))
    read_low_rank_query(reader, spec, modules, weights, hidden, False)
    weights.key = reader.linear(f"{name}.kv_proj", (shape.head_dim, hidden), False)
    weights.key_norm = reader.vector(f"{name}.kv_norm.weight", shape.head_dim)
    groups, rank = own.output_groups, own.output_rank
    size = groups * rank, shape.num_heads // groups * shape.head_dim
    parts = [
        reader.matrix(
            f"{name}.o_a_proj",
            size,
            rows=slice(group * rank, (group + 1) * rank),
            alias=f"{name}.o_a_proj.{group}",
        )
        for group in range(groups)
    ]
    weights.output = reader.linear(f"{name}.o_b_proj", (hidden, groups * rank), False)
    weights.shared_key = SharedKeyWeights(parts)
    if shape.entry_size is None:
        return
    name = f"{name}.compressor"
    weights.shared_key.entry = _entry(reader, name, shape, own, shape.head_dim, hidden)
    weights.shared_key.entry_norm = reader.vector(f"{name}.kv_norm.weight", shape.head_dim)
    if spec.indexer is None:
        return
    assert spec.low_rank_query is not None, "checked by `ModelSpec`"
    name, dim, heads = f"{name}.indexer", spec.indexer.head_dim, spec.indexer.num_heads
    factors = f"{name}.scorer.weights_proj"
    weights.indexer = IndexerWeights(
        reader.linear(f"{name}.q_b_proj", (heads * dim, spec.low_rank_query.rank), False),
        _entry(reader, name, shape, own, dim, hidden),
        reader.vector(f"{name}.kv_norm.weight", dim),
        Linear(reader.matrix(factors, (heads, hidden), keep_format=True)),
    )


def _entry(
    reader: TensorReader,
    name: str,
    shape: Attention,
    own: SharedKeySpec,
    numbers: int,
    hidden: int,
) -> EntryWeights:
    """The weights of entries of so many numbers."""
    groups, count = 1 + own.has_overlap, shape.entry_size
    assert count is not None, "the layer has entries"
    values, gates = (
        reader.linear(f"{name}.{part}_proj", (groups * numbers, hidden), False)
        for part in ("kv", "gate")
    )
    bias = reader.tensor(f"{name}.position_bias", (count, groups * numbers))
    return EntryWeights(values, gates, bias.reshape(count, groups, numbers))


def read_hyper_connections(
    reader: TensorReader, layer: str, spec: ModelSpec
) -> Sublayers[HyperWeights]:
    """The hyper-connections of a layer."""
    assert spec.hyper is not None, "the model has hyper-connections"
    count = spec.num_streams
    sizes = (count, count) if spec.hyper.magnitude is not None else (count, count, count * count)
    names = [f"{layer}.{part}_hc." for part in ("attn", "ffn")]
    if not reader.has(f"{names[0]}fn"):  # as published for GLM-5.3
        names = [f"{layer}.hc_{part}_" for part in ("attn", "ffn")]
    if not reader.has(f"{names[0]}fn"):  # and for Hy4
        names = [f"{layer}.hc_{part}_layer.hc_pre.hc_" for part in ("attn", "mlp")]
    mixer, mlp = (_hyper(reader, name, sizes, spec) for name in names)
    return Sublayers(mixer, mlp)


def read_last_hyper_weights(
    reader: TensorReader, spec: ModelSpec, module: str = "hc_head"
) -> HyperWeights:
    """Those of the streams after the last layer."""
    published = f"{module}.hc_head_"  # for Hy4
    prefix = published if reader.has(f"{published}fn") else f"{module}.hc_"
    return _hyper(reader, prefix, (spec.num_streams,), spec)


def _hyper(
    reader: TensorReader, prefix: str, sizes: tuple[int, ...], spec: ModelSpec
) -> HyperWeights:
    """One product, whose stored rows and biases have a factor for each of several parts."""
    rows, width = sum(sizes), spec.num_streams * spec.hidden_size
    factors = np.repeat(reader.vector(f"{prefix}scale", len(sizes)), sizes)
    matrix = reader.tensor(f"{prefix}fn", (rows, width)) * factors[:, None]
    weight = plain_weight(np.ascontiguousarray(matrix), f"model.{prefix}fn")
    return HyperWeights(Linear(weight, reader.vector(f"{prefix}base", rows)))
