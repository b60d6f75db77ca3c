"""Layers of embeddings of n-grams, and gates of streams (Qwen3.8)."""

from __future__ import annotations

import numpy as np

from anydecode.kernels.formats import plain_weight
from anydecode.kernels.interface import NgramHash, Recurrence, RecurrenceWeights
from anydecode.models.families.values import Config, int_value, list_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.gated_streams import StreamGates
from anydecode.models.limits import MAX_COUNT, MAX_WINDOW, refusal
from anydecode.models.ngrams import NgramWeights
from anydecode.models.spec import LayerSpec, ModelSpec, RecurrentSpec
from anydecode.models.streams import Sublayers

#: The type of layers of embeddings of n-grams.
NGRAMS = "ngrams"


def ngram_layer(config: Config) -> LayerSpec:
    """A layer of embeddings of n-grams: a convolution over positions `ngram_size` apart."""
    width = int_value(config, "hc_count", high=MAX_COUNT) * int_value(config, "hidden_size")
    order = int_value(config, "ngram_size", low=2, high=MAX_WINDOW)
    window = (int_value(config, "ple_conv_kernel_size", high=MAX_WINDOW) - 1) * order + 1
    if max(window, order) > MAX_WINDOW:
        raise refusal("ple_conv_kernel_size", config["ple_conv_kernel_size"], "fewer positions")
    shape = Recurrence("conv", width + 1, window, activation="silu")
    return LayerSpec(
        None, None, norms="none", mlp="none", recurrence=RecurrentSpec(shape), has_ngrams=True
    )


def read_ngrams(
    reader: TensorReader, config: Config, layer: str, spec: ModelSpec, own: LayerSpec
) -> NgramWeights:
    """Read a layer of embeddings of n-grams.

    Args:
        reader: The checkpoint's tensors.
        config: The config.
        layer: The layer's name.
        spec: The model's architecture.
        own: That of the layer.
    """
    assert own.recurrence is not None, "checked by `ModelSpec`"
    hidden, count, name = spec.hidden_size, spec.num_streams, f"{layer}.ple"
    order = int_value(config, "ngram_size")
    heads = (order - 1) * int_value(config, "heads_per_ngram", high=MAX_COUNT)
    inner = int_value(config, "ple_embed_dim", hidden)
    if inner % heads:
        raise refusal("ple_embed_dim", inner, f"a multiple of the {heads} heads of n-grams")
    end = int_value(config, "ple_end_token", low=0, high=spec.vocab_size - 1)
    multipliers, sizes, offsets = (
        _numbers(reader, config, f"{name}.ple_embedding.{part}", length)
        for part, length in (
            ("layer_multipliers", order),
            ("ngram_heads_vocab_sizes", heads),
            ("ngram_heads_offsets", heads),
        )
    )
    table_name = f"{name}.ple_embedding.ngram_embedding"
    if reader.has("embed_tokens_per_layer.weight"):  # GGUF files, with one such layer
        table_name = "embed_tokens_per_layer"
    table = reader.table(table_name, inner // heads)
    width, shape = count * hidden, own.recurrence.shape
    taps = reader.tensor(f"{name}.conv1d.weight", (width, 1, (shape.window - 1) // order + 1))
    conv = np.zeros((width + 1, shape.window), np.float32)
    conv[:width, ::order] = taps[:, 0]
    ones = plain_weight(np.ones((1, hidden), np.float32))
    ones.scale = hidden**-0.5
    key_norm, query_norm, conv_norm = (
        reader.vector(f"{name}.norm_{part}.weight", width, 1.0) for part in ("key", "query", "conv")
    )
    return NgramWeights(
        table,
        NgramHash(multipliers, sizes, offsets, end),
        reader.linear(f"{name}.key_proj", (width, inner), False),
        reader.linear(f"{name}.value_proj", (hidden, inner), False),
        key_norm,
        query_norm,
        conv_norm,
        ones,
        RecurrenceWeights(conv),
    )


def _numbers(reader: TensorReader, config: Config, name: str, size: int) -> np.ndarray:
    """A tensor of integers, which GGUF files have as metadata."""
    key = name.rpartition(".")[2]
    given = list_value(config, key, int)
    if given is None:
        return reader.integers(name, size)
    if len(given) < size or min(given) < 0:
        raise refusal(key, given, f"{size} integers, at least 0")
    return np.array(given[:size], np.int64)


def read_stream_gates(
    reader: TensorReader, name: str, spec: ModelSpec, has_factors: bool = True
) -> StreamGates:
    """Read the gates before a sublayer, or after the last layer."""
    count, rank = spec.num_streams, spec.stream_gate_rank
    width = count * spec.hidden_size
    gates = StreamGates(
        reader.vector(f"{name}.hc_norm.weight", width, 1.0),
        reader.linear(f"{name}.input_mix_weight_down", (rank, width), False),
        reader.linear(f"{name}.input_mix_weight_up", (width, rank), False),
    )
    gates.down.scale = 1.0 / count
    if has_factors:
        gates.factors = reader.linear(f"{name}.block_inject_weight", (count, width), False)
        gates.factors.scale = 1.0 / count
    return gates


def read_gated_sublayers(
    reader: TensorReader, layer: str, spec: ModelSpec
) -> Sublayers[StreamGates]:
    """Read the gates before the sublayers of a layer."""
    mixer, mlp = (
        read_stream_gates(reader, f"{layer}.{part}_hyper_connection", spec)
        for part in ("attn", "mlp")
    )
    return Sublayers(mixer, mlp)
