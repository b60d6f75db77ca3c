"""Reads the weights of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

The matrix from the latent to the keys and values of all heads is split by head, and the key part
is transposed, because it multiplies queries. GGUF files may have both parts as stacks of matrices.
"""

from __future__ import annotations

import numpy as np

from anydecode.kernels.formats import DTYPES, dequantize, is_packed, plain_weight
from anydecode.kernels.interface import Attention, Weight
from anydecode.models.families.values import Config, bool_value
from anydecode.models.families.weights import TensorReader, attention_name
from anydecode.models.linear import Linear
from anydecode.models.network import IndexerWeights, LatentWeights, LayerWeights
from anydecode.models.query_scale import QueryScale
from anydecode.models.shared_key import EntryWeights
from anydecode.models.spec import IndexerSpec, LatentSpec, LayerSpec


def read_latent(
    reader: TensorReader,
    config: Config,
    spec: LayerSpec,
    layer: str,
    weights: LayerWeights,
    hidden: int,
) -> None:
    """Read the attention of one layer into `weights`.

    Args:
        reader: The checkpoint's tensors.
        config: The config.
        spec: The layer's architecture, which has latent attention.
        layer: The layer's name.
        weights: Where to put them.
        hidden: The hidden size.
    """
    shape, latent, name = spec.attention, spec.latent, attention_name(reader, layer)
    assert shape is not None and latent is not None, "the layer has latent attention"
    has_bias, heads = bool_value(config, "attention_bias"), shape.num_heads
    keys, values = _heads(reader, name, shape, latent)
    has_keys = spec.cache_layer is None
    norm = reader.vector(f"{name}.kv_a_layernorm.weight", shape.value_dim) if has_keys else None
    weights.latent = LatentWeights(norm, keys, values)
    if latent.has_rotary_norm:
        rotary = reader.vector(
            f"{name}.k_rope_only_layernorm.weight", shape.head_dim - shape.value_dim
        )
        order = spec.key_order()
        own = slice(shape.value_dim, None)
        weights.latent.rotary_norm = (
            rotary if order is None else rotary[order[own] - shape.value_dim]
        )
    if spec.low_rank_query is not None and spec.low_rank_query.has_raw:
        _read_gated_query(reader, spec, latent, name, weights, (hidden, has_bias))
    elif spec.low_rank_query is not None:
        modules = tuple(f"{name}.{part}" for part in ("q_a_proj", "q_a_layernorm", "q_b_proj"))
        read_low_rank_query(reader, spec, modules, weights, hidden, has_bias)
    else:
        size = heads * spec.query_dim, hidden
        weights.query = reader.linear(f"{name}.q_proj", size, False, rows=spec.query_order())
    size = shape.head_dim, hidden
    if has_keys:
        name_down = f"{name}.kv_a_proj_with_mqa"
        weights.key = reader.linear(name_down, size, has_bias, rows=spec.key_order())
    if spec.has_query_scale:
        weights.query_scale = _read_query_scale(reader, name, heads)
    size = hidden, heads * latent.value_dim
    output = reader.first(f"{name}.{part}" for part in ("o_proj", "dense"))
    weights.output = reader.linear(output, size, has_bias)
    if spec.attention_gate is not None and weights.attention_gate is None:
        parts = ("g_proj", "gate_proj", "linear_gate")
        gate = reader.first(f"{name}.{part}" for part in parts)
        rows = heads if spec.gates_heads else heads * latent.value_dim
        weights.attention_gate = reader.linear(gate, (rows, hidden), False)
    if spec.indexer is not None:
        weights.indexer = _read_weighted_indexer(reader, spec, spec.indexer, name, hidden)


def _read_gated_query(
    reader: TensorReader,
    spec: LayerSpec,
    latent: LatentSpec,
    name: str,
    weights: LayerWeights,
    first: tuple[int, bool],
) -> None:
    """Read low-rank queries of a matrix that has, head by head, the rows of the query and of the
    gate; `first` is what the first matrix reads, and whether it has a bias."""
    assert spec.attention is not None and spec.low_rank_query is not None
    query, (hidden, has_bias) = spec.low_rank_query, first
    weights.query_down = reader.linear(f"{name}.q_a_proj", (query.rank, hidden), has_bias)
    weights.query_down_norm = reader.vector(f"{name}.q_a_layernorm.weight", query.rank)
    heads, dim = spec.attention.num_heads, spec.query_dim
    size = dim + latent.value_dim
    rows = np.arange(heads * size).reshape(heads, size)
    queries, order = rows[:, :dim].ravel(), spec.query_order()
    parts = {
        "query": queries if order is None else queries[order],
        "gate": rows[:, dim:].ravel(),
    }
    full, shape = f"{name}.q_gate_proj", (heads * size, query.width)
    weights.query, weights.attention_gate = (
        reader.linear(full, shape, False, rows=part, alias=f"{full}.{alias}")
        for alias, part in parts.items()
    )


def _read_weighted_indexer(
    reader: TensorReader, spec: LayerSpec, indexer: IndexerSpec, name: str, hidden: int
) -> IndexerWeights:
    """Read the indexer of a layer; the matrix of its weights in the stored format."""
    name, order = f"{name}.indexer", spec.indexer_order(1)
    heads, dim, rank = indexer.num_heads, indexer.head_dim, hidden
    if not indexer.has_own_query:
        assert spec.low_rank_query is not None, "checked by `ModelSpec`"
        rank = spec.low_rank_query.rank
    queries = reader.linear(
        f"{name}.wq_b", (heads * dim, rank), False, rows=spec.indexer_order(heads)
    )
    key: Linear | EntryWeights = reader.linear(f"{name}.wk", (dim, hidden), False, rows=order)
    if spec.attention is not None and spec.attention.has_block_keys:
        assert isinstance(key, Linear)
        key = _block_keys(reader, key, f"{name}.index_kpool_compress", spec.attention.index_block)
    weights = reader.matrix(f"{name}.weights_proj", (heads, hidden), keep_format=True)
    norms = [reader.vector(f"{name}.k_norm.{part}", dim) for part in ("weight", "bias")]
    norm, bias = norms if order is None else (vector[order] for vector in norms)
    found = IndexerWeights(queries, key, norm, Linear(weights), bias)
    if indexer.has_own_query:
        found.input_norm, found.input_norm_bias = (
            reader.vector(f"{name}.q_input_norm.{part}", hidden) for part in ("weight", "bias")
        )
        found.query_scale = _read_query_scale(reader, name, heads)
    return found


def _read_query_scale(reader: TensorReader, name: str, heads: int) -> QueryScale:
    slope, start = (
        reader.vector(f"{name}.softmax_scaling.{part}", heads) for part in ("scale", "bias")
    )
    return QueryScale(slope, start)


def _block_keys(reader: TensorReader, values: Linear, name: str, size: int) -> EntryWeights:
    """The weights of keys of blocks of so many positions; the names have no suffix."""
    numbers, hidden = values.weight.out_features, values.weight.in_features
    gates = plain_weight(reader.tensor(f"{name}_gate", (numbers, hidden)), f"model.{name}_gate")
    bias = reader.tensor(f"{name}_ape", (size, numbers))
    return EntryWeights(values, Linear(gates), bias[:, None])


def read_indexer(
    reader: TensorReader, spec: IndexerSpec, name: str, hidden: int, norm_offset: float
) -> IndexerWeights:
    """Read an indexer without weights of its heads (MiniMax-M3, Qwen3.8).

    Args:
        reader: The checkpoint's tensors.
        spec: The indexer.
        name: The name of the layer's attention. Names of the published checkpoint begin with
            `index_`, those of `transformers` with `indexer.`.
        hidden: The hidden size.
        norm_offset: Added to stored norm weights.
    """
    prefix = f"{name}.index_" if reader.has(f"{name}.index_q_proj.weight") else f"{name}.indexer."
    dim, fused = spec.head_dim, f"{prefix}index_qk_proj"
    size = spec.num_heads * dim
    if reader.has(f"{fused}.weight"):  # Qwen3.8
        query, key = (
            reader.linear(fused, (size + dim, hidden), False, rows=rows, alias=f"{prefix}{part}")
            for part, rows in (("q_proj", slice(0, size)), ("k_proj", slice(size, None)))
        )
    else:
        query, key = (
            reader.linear(f"{prefix}{part}_proj", (rows, hidden), False)
            for part, rows in (("q", size), ("k", dim))
        )
    query_norm, norm = (
        reader.vector(f"{one}.weight", dim, norm_offset)
        for one in (
            reader.first((f"{prefix}{part}_norm", f"{prefix}{part}_layernorm")) for part in "qk"
        )
    )
    return IndexerWeights(query, key, norm, query_norm=query_norm)


def read_low_rank_query(
    reader: TensorReader,
    spec: LayerSpec,
    modules: tuple[str, ...],
    weights: LayerWeights,
    hidden: int,
    has_bias: bool,
) -> None:
    """Read the queries of one layer, of which `LayerSpec.low_rank_query` is set, into `weights`.

    Args:
        reader: The checkpoint's tensors.
        spec: The layer's architecture.
        modules: The names of the first matrix, of the norm behind it, and of the second matrix.
        weights: Where to put them.
        hidden: The hidden size.
        has_bias: Whether the first matrix must have a bias.
    """
    assert spec.attention is not None and spec.low_rank_query is not None
    (down, norm, up), rank = modules, spec.low_rank_query.rank
    weights.query_down = reader.linear(down, (rank, hidden), has_bias)
    weights.query_down_norm = reader.vector(f"{norm}.weight", rank)
    size = spec.attention.num_heads * spec.query_dim, rank
    weights.query = reader.linear(up, size, False, rows=spec.query_order())


def _heads(
    reader: TensorReader, name: str, shape: Attention, latent: LatentSpec
) -> tuple[list[Weight], list[Weight]]:
    """The matrices of keys `[latent_dim, key_dim]` and values `[value_dim, latent_dim]` by head."""
    rank, heads = shape.value_dim, range(shape.num_heads)
    fused = f"{name}.kv_b_proj"
    if not reader.has(f"{fused}.weight") and reader.has(f"{name}.k_b_proj.0.weight"):
        keys = [reader.matrix(f"{name}.k_b_proj.{h}", (rank, latent.key_dim)) for h in heads]
        values = [reader.matrix(f"{name}.v_b_proj.{h}", (latent.value_dim, rank)) for h in heads]
        return keys, values
    size = latent.key_dim + latent.value_dim
    stored = reader.matrix(fused, (shape.num_heads * size, rank), keep_format=True)
    keys, values = [], []
    for head in heads:
        start, middle, stop = (head * size + at for at in (0, latent.key_dim, size))
        part = reader.convert(stored, fused, rows=slice(start, middle), keep_format=True)
        key = plain_weight(_transposed(part))
        keys.append(reader.convert(key, f"{name}.k_b_proj.{head}"))
        values.append(reader.convert(stored, f"{name}.v_b_proj.{head}", rows=slice(middle, stop)))
    return keys, values


def _transposed(weight: Weight) -> np.ndarray:
    """The transpose of a matrix; of a packed one in float16, with a relative error of at most
    1/2048."""
    if is_packed(weight.format):
        return np.ascontiguousarray(dequantize(weight).T.astype(DTYPES["F16"]))
    data = weight.data if weight.scale == 1 else dequantize(weight)
    return np.ascontiguousarray(data.T)
