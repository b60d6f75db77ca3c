"""Builds a `Transformer` from a checkpoint's tensors in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels import portable
from anydecode.kernels.formats import DTYPES as FLOATS
from anydecode.kernels.formats import dequantize, plain_weight
from anydecode.kernels.interface import Attention, Weight, Xielu
from anydecode.models.block_residuals import BlockResiduals
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.attention_experts import read_attention_experts
from anydecode.models.families.config import is_expert_layer, spec_from_config, text_config
from anydecode.models.families.convolved_attention import read_convolved_attention
from anydecode.models.families.distance_biases import read_distance_biases
from anydecode.models.families.experts import read_expert_norms, read_experts
from anydecode.models.families.family import Family
from anydecode.models.families.latent import read_indexer, read_latent, read_low_rank_query
from anydecode.models.families.learned_rope import with_learned_rope
from anydecode.models.families.ngrams import (
    read_gated_sublayers,
    read_ngrams,
    read_stream_gates,
)
from anydecode.models.families.recurrent import multiplier, multipliers
from anydecode.models.families.relative_positions import read_relative_positions
from anydecode.models.families.residual_gates import read_residual_gates
from anydecode.models.families.router_states import read_router_states
from anydecode.models.families.sambay import read_differential, read_memory_unit
from anydecode.models.families.shared_blocks import read_shared_block
from anydecode.models.families.shared_key import (
    read_hyper_connections,
    read_last_hyper_weights,
    read_shared_key,
)
from anydecode.models.families.sum_biases import read_sum_biases
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import (
    Config,
    bool_value,
    int_value,
    layer_config,
    list_value,
    optional_number,
)
from anydecode.models.families.weights import TensorReader
from anydecode.models.files import untrusted
from anydecode.models.key_bias import KeyBias
from anydecode.models.limits import MAX_LAYERS, MAX_TOKENS, refusal
from anydecode.models.linear import Linear
from anydecode.models.lora import set_adapter
from anydecode.models.mlstm import Mlstm
from anydecode.models.network import (
    ConfidenceHead,
    Experts,
    GatedMlp,
    LayerWeights,
    ModelWeights,
    Network,
    PlainMlp,
    RecurrentWeights,
    SideOutput,
    UnmaskingHead,
)
from anydecode.models.norm_gate import NormGate
from anydecode.models.per_layer import PerLayerBlock, PerLayerEmbeddings
from anydecode.models.self_conditioning import PlainSelfConditioning, SelfConditioning
from anydecode.models.spec import LayerSpec, ModelSpec, TimeSpec
from anydecode.models.streams import StreamBlock, StreamProjections
from anydecode.models.time_conditioning import (
    FINAL_PARTS,
    LAYER_PARTS,
    WAVES,
    Affine,
    SharedTimeConditioning,
    TimeConditioning,
)
from anydecode.models.time_mix import DynamicMixWeights, TimeMix
from anydecode.models.transformer import Executor, Transformer


def build_model(
    checkpoint: Checkpoint,
    dtype: str | None = None,
    *,
    max_positions: int | None = None,
    executor: Callable[[Network], Executor],
) -> Transformer:
    """Build the model of a checkpoint.

    Args:
        checkpoint: The opened checkpoint.
        dtype: "float32", "bfloat16", "float16", "int8" (Q8_0), "int4" (Q4_0; the embedding and the
            head Q8_0), or None for the stored formats.
        max_positions: The context length, see `spec_from_config`.
        executor: Makes the executor of the network, see `choose_executor`.

    Raises:
        CheckpointError: A tensor or config key is missing, invalid or unsupported.
        InvalidRequestError: `dtype` is unknown.
    """
    network = load_network(checkpoint, dtype, max_positions=max_positions, keeps_updates=True)
    return Transformer(network, name=checkpoint.name, executor=executor)


def load_network(
    checkpoint: Checkpoint,
    dtype: str | None = None,
    *,
    max_positions: int | None = None,
    keeps_updates: bool = False,
) -> Network:
    """The architecture and the weights of a checkpoint. Arguments and errors as for `build_model`.

    With `keeps_updates`, updates of packed matrices (`Checkpoint.updates`) stay beside these, as
    `build_model` does it; otherwise they are merged. Those of `Checkpoint.adapters` are always
    beside their matrices.
    """
    with untrusted(checkpoint.path):
        spec = spec_from_config(checkpoint.config, dtype=dtype, max_positions=max_positions)
        reader = _reader(checkpoint, dtype, keeps_updates)
        if FAMILIES[text_config(checkpoint.config)["model_type"]].has_learned_rope:
            spec = with_learned_rope(reader, spec)
        network = Network(spec, _read_weights(checkpoint, spec, reader))
        for path, factors in checkpoint.adapters:
            set_adapter(path, factors, network)
        return network


def _reader(checkpoint: Checkpoint, dtype: str | None, keeps_updates: bool) -> TensorReader:
    """The reader of the tensors of a checkpoint."""
    config = text_config(checkpoint.config)
    family = FAMILIES[config["model_type"]]
    name = _embedding_name(checkpoint, family)
    stored_name = None if family.stored_name is None else partial(family.stored_name, config)
    return TensorReader(checkpoint, dtype, name, keeps_updates, stored_name)


def _read_weights(checkpoint: Checkpoint, spec: ModelSpec, reader: TensorReader) -> ModelWeights:
    """Read all weights of a model."""
    config = text_config(checkpoint.config)
    family = FAMILIES[config["model_type"]]
    name = _embedding_name(checkpoint, family)
    shape = (spec.vocab_size, spec.hidden_size)
    unused = family.num_unused_embeddings
    embedding = reader.matrix(
        name,
        (spec.vocab_size + unused, spec.hidden_size),
        rows=slice(0, spec.vocab_size) if unused else None,
        is_outer=True,
    )
    # Checkpoints with tied embeddings do not store the head, and encoders have none.
    is_tied = spec.is_encoder or bool_value(config, "tie_word_embeddings")
    if checkpoint.pooling is not None and not reader.has("lm_head.weight"):
        is_tied = True  # nothing reads the head
    head = embedding if is_tied else _read_head(reader, config, shape)
    # Layers that predict further tokens follow the others, and are left out.
    num_unused = int_value(config, "num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS)
    num_stored = int_value(config, "num_stored_layers", spec.num_layers, high=MAX_LAYERS)
    if reader.has_module(f"layers.{num_stored + num_unused}"):
        raise CheckpointError(
            f"num_hidden_layers is {num_stored}, but {checkpoint.name} contains more layers"
        )
    layers = [read_layer(reader, spec, config, index) for index in range(num_stored)]
    sources = list_value(config, "layer_sources", int)
    layers = layers if sources is None else [layers[source] for source in sources]
    final = family.names.get("norm", "norm")
    norm = None
    if spec.has_final_norm:
        of_final = family if family.has_final_offset else replace(family, norm_offset=0.0)
        norm = read_norm(reader, of_final, final, spec.hidden_size)
    bias_name = next(filter(reader.has, ("lm_head.bias", "decoder.bias")), None)
    bias = None if bias_name is None else reader.vector(bias_name, spec.vocab_size)
    has_bias = family.has_norm_bias and spec.has_final_norm
    norm_bias = reader.vector(f"{final}.bias", spec.hidden_size) if has_bias else None
    table = None
    if spec.has_position_table:
        shape = (int_value(config, "max_position_embeddings"), spec.hidden_size)
        table = reader.matrix("embed_positions", shape, keep_format=True)
        table = reader.convert(
            table, "embed_positions", rows=slice(0, spec.max_positions), keep_format=True
        )
    weights = ModelWeights(embedding, layers, norm, head, bias, norm_bias, table)
    if family.has_sum_biases:
        inputs = reader.vector("input_hidden_states_bias", spec.hidden_size)
        weights.input_bias = plain_weight(inputs[None])
        weights.input_factors = reader.vector("input_hidden_states_scale", spec.hidden_size)
    if spec.has_embedding_norm:
        name = family.names.get("embed_norm", "embed_norm")
        has_weights = family.has_norm_weights and family.has_embedding_norm_weights
        of_embedding = replace(family, has_norm_weights=has_weights)
        weights.embedding_norm = read_norm(reader, of_embedding, name, spec.hidden_size)
        if family.has_norm_bias:
            weights.embedding_norm_bias = reader.vector(f"{name}.bias", spec.hidden_size)
    if spec.head_activation is not None:
        shape = (spec.hidden_size, spec.hidden_size)
        weights.head_dense = reader.linear("lm_head.dense", shape, False)
        weights.head_norm = reader.vector("lm_head.norm.weight", spec.hidden_size)
    if spec.num_segments:
        shape = (spec.num_segments, spec.hidden_size)
        weights.segments = reader.tensor("embed_segments.weight", shape)
    if spec.per_layer_size:
        weights.per_layer = _read_per_layer(reader, spec, config)
    if spec.hyper is not None and not spec.hyper.has_mean:
        weights.hyper = read_last_hyper_weights(reader, spec)
    elif spec.residual_block:
        weights.residual_score = read_residual_score(reader, "output_attn_res", spec.hidden_size)
    elif spec.stream_gate_rank:
        name = "hyper_connection_mixer"
        weights.stream_gates = read_stream_gates(reader, name, spec, has_factors=False)
    elif spec.predicts_streams:
        weights.streams = _read_streams(reader, spec)
    if family.has_states:
        start = reader.vector("z_L_init", spec.hidden_size)
        weights.memory_start = plain_weight(start[None])
    if any(layer.memory == "side" for layer in spec.layers):
        weights.unmasking = _read_unmasking(reader, spec)
    if spec.has_canvas and spec.time is None:
        weights.self_conditioning = _read_self_conditioning(reader, spec, config)
    elif spec.has_canvas:
        weights.self_conditioning = _read_plain_self_conditioning(reader, spec, config)
    if spec.time is not None:
        weights = _with_time(reader, spec, spec.time, weights)
    return weights


def _embedding_name(checkpoint: Checkpoint, family: Family) -> str:
    """The name of the embedding in a checkpoint."""
    usual = "embed_tokens"
    other = family.other_names.get(usual)
    if other is not None and any(name.endswith(f"{other}.weight") for name in checkpoint.tensors):
        return other
    return family.names.get(usual, usual)


def _read_head(reader: TensorReader, config: Config, shape: tuple[int, int]) -> Weight:
    """The matrix of the head, of which Baichuan 2 divides each row by its norm."""
    if not bool_value(config, "has_normed_head"):
        return reader.matrix("lm_head", shape, is_outer=True)
    stored = reader.matrix("lm_head", shape, keep_format=True)
    rows = dequantize(stored)
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    rows /= np.maximum(norms, 1e-12).astype(np.float32)[:, None]
    normed = plain_weight(rows.astype(FLOATS.get(stored.format, FLOATS["F32"])))
    return reader.convert(normed, "lm_head", is_outer=True)


def _with_time(
    reader: TensorReader, spec: ModelSpec, time: TimeSpec, weights: ModelWeights
) -> ModelWeights:
    """The weights of a model whose layers depend on the time, as they are at time 0."""

    def affine(name: str, outputs: int, inputs: int) -> Affine:
        weight = reader.tensor(f"{name}.weight", (outputs, inputs))
        return Affine(weight, reader.vector(f"{name}.bias", outputs))

    hidden, size = spec.hidden_size, time.size
    assert weights.final_norm is not None
    if time.modulates_inputs:
        weights.time = SharedTimeConditioning(
            affine("sigma_embed.mlp.0", size, WAVES),
            affine("sigma_embed.mlp.2", size, size),
            affine("adaln_proj.1", 3 * hidden, size),
            reader.tensor("adaln_block_emb", (spec.num_layers, 3 * hidden)),
            weights.final_norm,
        )
        return weights.at_time(time.value(0.0))
    layers = (f"layers.{index}.modulation" for index in range(spec.num_layers))
    norms = []
    for layer in weights.layers:
        assert layer.attention_norm is not None and layer.mlp_norm is not None
        norms.append((layer.attention_norm, layer.mlp_norm))
    weights.time = TimeConditioning(
        affine("time_embedding.first", size, WAVES),
        affine("time_embedding.second", size, size),
        [affine(name, LAYER_PARTS * hidden, size) for name in layers],
        affine("modulation", FINAL_PARTS * hidden, size),
        norms,
        weights.final_norm,
    )
    return weights.at_time(time.value(0.0))


def read_norm(reader: TensorReader, family: Family, name: str, size: int) -> np.ndarray:
    """The weights of the norm `name`: ones if the family's norms have none."""
    if not family.has_norm_weights:
        return np.ones(size, np.float32)
    return reader.vector(f"{name}.weight", size, family.norm_offset)


def _read_unmasking(reader: TensorReader, spec: ModelSpec) -> UnmaskingHead:
    norm = reader.vector("unmasking.norm.weight", spec.hidden_size)
    weight = reader.tensor("unmasking.head.weight", (1, spec.hidden_size))[0]
    bias = float(reader.vector("unmasking.head.bias", 1)[0])
    return UnmaskingHead(norm, ConfidenceHead(weight, bias))


def _read_self_conditioning(
    reader: TensorReader, spec: ModelSpec, config: Config
) -> SelfConditioning:
    hidden, inner = spec.hidden_size, int_value(config, "intermediate_size")
    gate, up, down = (
        reader.linear(f"self_conditioning.{name}_proj", shape, False)
        for name, shape in (
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
        )
    )
    norm = reader.vector("self_conditioning.pre_norm.weight", hidden)
    return SelfConditioning(norm, gate, up, down)


def _read_plain_self_conditioning(
    reader: TensorReader, spec: ModelSpec, config: Config
) -> PlainSelfConditioning:
    shape = (spec.hidden_size, spec.hidden_size)
    has_bias = bool_value(config, "selfcond_ffn_bias", True)
    return PlainSelfConditioning(
        reader.vector("selfcond_norm.weight", spec.hidden_size),
        reader.linear("selfcond_ffn.0", shape, has_bias),
        reader.linear("selfcond_ffn.2", shape, False),
    )


def read_residual_score(reader: TensorReader, name: str, hidden: int) -> Weight:
    """The score of sums of blocks of layers (Kimi K3): the weights of a norm, times a matrix of one
    row. GGUF files have the product."""
    if reader.has(f"{name}_score.weight"):
        score = reader.vector(f"{name}_score.weight", hidden)
    else:
        score = reader.vector(f"{name}_norm.weight", hidden)
        score = score * reader.tensor(f"{name}_proj.weight", (1, hidden))[0]
    return plain_weight(score[None])


def _read_streams(reader: TensorReader, spec: ModelSpec) -> StreamProjections:
    shape = (spec.hidden_size, spec.hidden_size)
    first, last = (
        [reader.linear(f"{name}.{i}", shape, False) for i in range(spec.num_streams - 1)]
        for name in ("altup_projections", "altup_unembed_projections")
    )
    return StreamProjections(first, last)


def _read_per_layer(reader: TensorReader, spec: ModelSpec, config: Config) -> PerLayerEmbeddings:
    size, hidden, family = spec.per_layer_size, spec.hidden_size, FAMILIES[config["model_type"]]
    rows = int_value(config, "vocab_size_per_layer_input", spec.vocab_size, high=MAX_TOKENS)
    width = spec.num_layers * size
    table = None
    if family.has_per_layer_table:
        table = reader.matrix("embed_tokens_per_layer", (rows, width), is_outer=True)
    names = ("per_layer_model_projection", "per_layer_projection_norm")
    name, norm_name = (family.names.get(usual, usual) for usual in names)
    projection = reader.linear(name, (width, hidden), False)
    projection.scale = hidden**-0.5
    norm = reader.vector(f"{norm_name}.weight", size)
    return PerLayerEmbeddings(table, projection, norm)


def read_layer(reader: TensorReader, spec: ModelSpec, config: Config, index: int) -> LayerWeights:
    """The weights of layer `index` of a model; `config` is its `text_config`."""
    return _LayerReader(reader, spec, config, index).read()


class _LayerReader:
    """Reads the weights of one layer."""

    def __init__(self, reader: TensorReader, spec: ModelSpec, config: Config, index: int) -> None:
        self._reader = reader
        self._config = layer_config(config, index)
        self._family = FAMILIES[config["model_type"]]
        self._spec: LayerSpec = spec.layers[index]
        self._hidden, self._per_layer_size = spec.hidden_size, spec.per_layer_size
        self._model, self._memory_size = spec, spec.memory_size
        self._has_canvas, self._max_positions = spec.has_canvas, spec.max_positions
        self._index = index
        self._name = f"layers.{index}"

    def read(self) -> LayerWeights:
        if self._spec.memory == "embeddings":
            return self._with_shared_block()
        if self._spec.has_ngrams:
            ngrams = read_ngrams(self._reader, self._config, self._name, self._model, self._spec)
            return LayerWeights(ngrams=ngrams)
        layer, has_mlp = LayerWeights(), self._spec.mlp != "none"
        if self._spec.attention is not None:
            self._read_attention(layer, self._spec.attention)
        if self._spec.memory == "reads":
            layer.memory_unit = read_memory_unit(
                self._reader, self._name, (self._memory_size, self._hidden)
            )
        if self._spec.memory == "side":
            shape = self._hidden, self._hidden
            projection = self._reader.linear(f"{self._name}.side.projection", shape, True)
            layer.side = SideOutput(self._norm("side.norm"), projection)
        layer.recurrent = self._recurrent()
        if has_mlp:
            layer.mlp = self._mlp()
            if self._spec.activation == "xielu":
                layer.xielu = self._xielu()
        if isinstance(layer.recurrent, TimeMix) and self._spec.mlp == "plain":
            layer.mlp_mix = self._reader.vector(self._full("mlp.mix"), self._hidden)
            if isinstance(layer.recurrent, DynamicMixWeights):
                self._read_receptance(layer, layer.recurrent.output.scale)
        if self._per_layer_size:
            layer.per_layer = self._per_layer()
        if self._model.hyper is not None:
            layer.hyper = read_hyper_connections(self._reader, self._name, self._model)
        elif self._model.residual_block:
            layer.residuals = self._residuals()
        elif self._model.stream_gate_rank:
            layer.stream_gates = read_gated_sublayers(self._reader, self._name, self._model)
        elif self._model.predicts_streams:
            layer.streams = self._streams(self._model.num_streams)
        if self._spec.has_scale:
            name = f"{self._name}.layer_scalar"  # GGUF files may lack it
            layer.scale = float(self._reader.vector(name, 1)[0]) if self._reader.has(name) else 1.0
        if self._has_canvas and self._spec.has_scale:  # the scales of the layers' two roles
            layer.canvas_scale, name = layer.scale, f"context.{self._name}.layer_scalar"
            layer.scale = float(self._reader.vector(name, 1)[0])
        if self._family.multipliers:
            self._multiply(layer)
        post, both = self._spec.norms in ("post", "sum"), self._spec.norms == "both"
        if not post and self._spec.norms != "none":
            has_first = self._spec.has_attention_norm and self._spec.has_mixer
            if has_first:
                layer.attention_norm = self._norm("input_layernorm")
                rank = self._spec.attention_norm_gate
                layer.attention_norm_gate = self._norm_gate("attention", rank)
            second = "pre_feedforward_layernorm" if both else "post_attention_layernorm"
            if self._family.shares_norm and self._spec.is_parallel:
                second = "input_layernorm"
            if self._spec.experts_read_inputs:  # whose norm has the usual name
                second = "residual_layernorm"
            if has_mlp:
                layer.mlp_norm = self._norm(second)
                layer.mlp_norm_gate = self._norm_gate("mlp", self._spec.mlp_norm_gate)
            if self._family.has_norm_bias:
                if has_first:
                    layer.attention_norm_bias = self._norm_bias("input_layernorm")
                layer.mlp_norm_bias = self._norm_bias(second)
        if self._family.has_residual_gates:
            read_residual_gates(self._reader, self._config, self._name, layer, self._hidden)
        else:
            self._read_post_norms(layer)
        if self._family.residual_factors is not None:
            layer.attention_residual, layer.mlp_residual = (
                self._reader.vector(f"{self._name}.{name}", self._hidden)
                for name in self._family.residual_factors
            )
        if self._family.has_sum_biases:
            read_sum_biases(self._reader, self._name, layer, self._hidden)
        if self._spec.memory == "routes":
            shape = self._memory_size, self._hidden
            layer.router_states = read_router_states(
                self._reader, self._name, shape, self._model.norm_eps, self._index == 0
            )
        if self._spec.has_attention_inner_norm:
            assert self._spec.attention is not None, "checked by `ModelSpec`"
            size = self._spec.attention.num_heads * self._spec.attention.value_dim
            layer.attention_inner_norm = self._norm("self_attn.inner_norm", size)
        if self._spec.has_mlp_inner_norm:
            inner = int_value(self._config, "intermediate_size")
            layer.mlp_inner_norm = self._norm("mlp.inner_norm", inner)
        if self._spec.has_second_sum:
            layer.second_norm = self._norm("second_attention_layernorm")
            layer.second_norm_bias = self._norm_bias("second_attention_layernorm")
        return layer

    def _read_receptance(self, layer: LayerWeights, factor: float) -> None:
        """The rest of RWKV-6's MLP; its output has the factor of that of the time mixing."""
        assert isinstance(layer.mlp, PlainMlp), "the MLPs of this family"
        hidden, name = self._hidden, self._full("mlp.receptance")
        layer.mlp_receptance_mix = self._reader.vector(self._full("mlp.receptance_mix"), hidden)
        layer.mlp_receptance = self._reader.linear(name, (hidden, hidden), False)
        layer.mlp.down.scale = factor

    def _read_post_norms(self, layer: LayerWeights) -> None:
        """Read the norms behind the sublayers."""
        if self._spec.norms in ("post", "sum", "both"):
            layer.attention_post_norm = self._norm("post_attention_layernorm")
            if self._family.has_norm_bias:
                layer.attention_post_norm_bias = self._norm_bias("post_attention_layernorm")
                layer.mlp_post_norm_bias = self._norm_bias("post_feedforward_layernorm")
        if self._spec.norms_output:
            layer.mlp_post_norm = self._norm("post_feedforward_layernorm")

    def _recurrent(self) -> RecurrentWeights | TimeMix | Mlstm | None:
        if self._spec.recurrence is None:
            return None
        assert self._family.recurrent is not None, "its spec has a recurrence"
        return self._family.recurrent.read(
            self._reader, self._config, self._name, self._spec.recurrence, self._hidden
        )

    def _with_shared_block(self) -> LayerWeights:
        layer = LayerWeights(recurrent=self._recurrent())
        projection = self._reader.linear(
            f"{self._name}.linear", (self._hidden, self._hidden), False
        )
        layer.side = SideOutput(self._norm("mamba_decoder.input_layernorm"), projection)
        read_shared_block(self._reader, self._config, self._spec, layer, self._index)
        return layer

    def _read_attention(self, layer: LayerWeights, shape: Attention) -> None:
        if self._spec.latent is not None:
            config = layer_config(self._config, self._index)
            read_latent(self._reader, config, self._spec, self._name, layer, self._hidden)
            is_scaled = bool_value(self._config, "apply_mla_qkv_lora_rescale", True)
            if self._family.has_scaled_ranks and is_scaled:
                self._scale_ranks(layer)
        elif self._spec.shared_key is not None:
            read_shared_key(self._reader, self._spec, self._name, layer, self._model)
        elif self._spec.low_rank_query is not None:
            self._read_factored_attention(layer, shape)
        elif self._spec.attention_gate is not None:
            self._read_gated_attention(layer, shape)
        elif self._spec.is_convolved:
            read_convolved_attention(self._reader, self._config, self._name, layer, shape)
        elif self._spec.query_routing is not None:
            read_attention_experts(self._reader, self._config, self._name, layer, shape)
        elif self._spec.cache_layer is not None or not self._spec.has_value:
            self._read_partial_attention(layer, shape)
        else:
            layer.query, layer.key, layer.value, layer.output = self._attention(shape)
        if self._spec.indexer is not None and layer.indexer is None:
            name, offset = f"{self._name}.self_attn", self._family.norm_offset
            layer.indexer = read_indexer(
                self._reader, self._spec.indexer, name, self._hidden, offset
            )
        if self._spec.has_key_bias:
            layer.key_bias = self._key_bias(shape)
        if self._spec.is_differential:
            name = self._full("self_attn.difference")
            eps = self._model.norm_eps if self._spec.has_distant_pairs else None
            layer.differential = read_differential(self._reader, name, self._index, shape, eps)
        if self._spec.bias_reach:
            layer.distance_biases = read_distance_biases(
                self._reader, self._config, shape.num_heads
            )
        if self._spec.has_relative_positions:
            layer.relative_positions = read_relative_positions(
                self._reader, self._config, layer, shape, self._max_positions
            )
        factor = optional_number(self._config, "attention_value_scale")
        if factor is not None and layer.value is not None:
            layer.value.scale = factor
        if self._spec.has_sinks:
            sinks = ("sinks", "attention_sink_bias", "learnable_sink_param")
            options = [f"{self._name}.self_attn.{one}" for one in sinks]
            name = next(filter(self._reader.has, options), options[0])
            layer.sinks = self._reader.vector(name, shape.num_heads)
        if self._spec.qk_norm == "heads":
            names = ("self_attn.q_norm", "self_attn.k_norm")
            layer.query_norm = self._head_norms(names[0], shape.num_heads, self._spec.query_order())
            layer.key_norm = self._head_norms(names[1], shape.num_kv_heads, self._spec.key_order())
            if self._reader.has(f"{self._full(names[0])}.bias"):
                layer.query_norm_bias = self._head_bias(names[0], layer.query_norm)
                layer.key_norm_bias = self._head_bias(names[1], layer.key_norm)
        elif self._spec.qk_norm not in (None, "plain"):
            per_head = self._spec.qk_norm == "head"
            heads, kv_heads = (1, 1) if per_head else (shape.num_heads, shape.num_kv_heads)
            dim = self._spec.query_dim
            layer.query_norm = self._norm("self_attn.q_norm", heads * dim)
            if self._spec.cache_layer is None:
                layer.key_norm = self._norm("self_attn.k_norm", kv_heads * dim)
            order = self._spec.query_order()
            if per_head and order is not None:
                layer.query_norm = layer.query_norm[order[:dim]]
                if layer.key_norm is not None:
                    layer.key_norm = layer.key_norm[order[:dim]]
            if self._reader.has(f"{self._full('self_attn.q_norm')}.bias"):
                layer.query_norm_bias = self._head_bias("self_attn.q_norm", layer.query_norm)
                layer.key_norm_bias = self._head_bias("self_attn.k_norm", layer.key_norm)

    def _key_bias(self, shape: Attention) -> KeyBias:
        name, count = f"{self._name}.self_attn", shape.num_kv_heads
        steps = self._reader.matrix(
            f"{name}.dt_proj", (count, count * shape.value_dim), keep_format=True
        )
        has_bias = bool_value(self._config, "attention_bias")
        bias = self._reader.vector(f"{name}.dt_proj.bias", count) if has_bias else None
        ones = plain_weight(np.ones((1, shape.num_heads), np.float32))
        return KeyBias(Linear(steps, bias), self._reader.vector(f"{name}.A", count), ones)

    def _scale_ranks(self, layer: LayerWeights) -> None:
        """Multiply the norms of latent attention by the factors of queries and latents."""
        assert layer.latent is not None
        for norm in (layer.latent.norm, layer.query_down_norm):
            assert norm is not None, "the queries have a low rank, and the layer has latents"
            norm *= np.float32((self._hidden / len(norm)) ** 0.5)

    def _multiply(self, layer: LayerWeights) -> None:
        """Apply Falcon-H1's factors of the attention's and the MLP's products."""
        config = self._config
        before = multiplier(config, "attention_in_multiplier")
        assert layer.query and layer.key and layer.value and layer.output
        for linear in (layer.query, layer.key, layer.value):
            linear.scale = before
            if linear.bias is not None:
                linear.bias = linear.bias / np.float32(before)
        layer.key.scale *= multiplier(config, "key_multiplier")
        layer.output.scale = multiplier(config, "attention_out_multiplier")
        assert isinstance(layer.mlp, GatedMlp)
        layer.mlp.gate.scale, layer.mlp.down.scale = multipliers(config, "mlp_multipliers", 2)

    def _read_gated_attention(self, layer: LayerWeights, shape: Attention) -> None:
        """Read attention whose query matrix has, head by head, the rows of query and gate, if the
        gate has no matrix of its own, whose name is one of two."""
        bias = bool_value(self._config, "attention_bias")
        gate = self._reader.first(f"{self._name}.self_attn.{one}_proj" for one in ("gate", "g"))
        if self._reader.has(f"{gate}.weight"):
            layer.query, layer.key, layer.value, layer.output = self._attention(shape)
            size = shape.num_heads * (1 if self._spec.gates_heads else shape.head_dim)
            has_bias = self._reader.has(f"{gate}.bias")
            layer.attention_gate = self._reader.linear(gate, (size, self._hidden), has_bias)
            return
        size = shape.num_heads * shape.head_dim
        order = np.arange(2 * size).reshape(shape.num_heads, 2, -1)
        name, full = self._full("self_attn.q_proj"), (2 * size, self._hidden)
        layer.query, layer.attention_gate = (
            self._reader.linear(name, full, bias, rows=order[:, part].ravel(), alias=alias)
            for part, alias in enumerate((f"{name}.query", f"{name}.gate"))
        )
        self._read_all_but_query(layer, shape, bias)

    def _read_factored_attention(self, layer: LayerWeights, shape: Attention) -> None:
        """Read attention whose queries are a product of two matrices."""
        bias = bool_value(self._config, "attention_bias")
        modules = ("self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj")
        names = tuple(self._full(module) for module in modules)
        read_low_rank_query(self._reader, self._spec, names, layer, self._hidden, bias)
        self._read_all_but_query(layer, shape, bias)

    def _read_all_but_query(self, layer: LayerWeights, shape: Attention, bias: bool) -> None:
        size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        layer.key, layer.value = (
            self._reader.linear(self._full(f"self_attn.{part}"), (kv_size, self._hidden), bias)
            for part in ("k_proj", "v_proj")
        )
        name = self._full("self_attn.o_proj")
        layer.output = self._reader.linear(name, (self._hidden, size), bias)

    def _read_partial_attention(self, layer: LayerWeights, shape: Attention) -> None:
        """Read attention without a matrix of values, or of keys and values."""
        bias = bool_value(self._config, "attention_bias")
        size = shape.num_heads * self._spec.query_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        layer.query, layer.output = (
            self._reader.linear(self._full(f"self_attn.{part}"), full, bias)
            for part, full in (("q_proj", (size, self._hidden)), ("o_proj", (self._hidden, size)))
        )
        if self._spec.cache_layer is None:
            name = self._full("self_attn.k_proj")
            layer.key = self._reader.linear(name, (kv_size, self._hidden), bias)

    def _per_layer(self) -> PerLayerBlock:
        size, hidden = self._per_layer_size, self._hidden
        return PerLayerBlock(
            self._reader.linear(self._full("per_layer_input_gate"), (size, hidden), False),
            self._reader.linear(self._full("per_layer_projection"), (hidden, size), False),
            self._norm("post_per_layer_input_norm"),
        )

    def _residuals(self) -> BlockResiduals:
        """The scores of the sums of blocks; those of the first layer's attention are not used."""
        mixer, mlp = (
            read_residual_score(self._reader, f"{self._name}.{part}_res", self._hidden)
            if part == "mlp" or self._index
            else None
            for part in ("self_attention", "mlp")
        )
        assert mlp is not None
        return BlockResiduals(mixer, mlp)

    def _streams(self, count: int) -> StreamBlock:
        hidden, rank = self._hidden, int_value(self._config, "laurel_rank")

        def small(name: str, rows: int, columns: int) -> Linear:
            """A matrix too small to be worth converting."""
            full = f"{self._name}.altup.{name}"
            return Linear(self._reader.matrix(full, (rows, columns), keep_format=True))

        router = small("modality_router", count, hidden)
        router.scale = 1.0 / hidden
        correction = small("correction_coefs", count, count)
        correction.bias = np.ones(count, np.float32)
        scale = None
        if bool_value(self._config, "altup_correct_scale"):
            scale = self._reader.vector(f"{self._name}.altup.correct_output_scale", hidden)
        return StreamBlock(
            router,
            self._norm("altup.router_norm"),
            small("prediction_coefs", count * count, count),
            correction,
            scale,
            self._reader.linear(f"{self._name}.laurel.linear_left", (rank, hidden), False),
            self._reader.linear(f"{self._name}.laurel.linear_right", (hidden, rank), False),
            self._norm("laurel.post_laurel_norm"),
        )

    def _full(self, module: str) -> str:
        """The name of a module of the layer in the family's checkpoints."""
        other = self._family.other_names.get(module)
        if other is not None and self._reader.has_module(f"{self._name}.{other}"):
            return f"{self._name}.{other}"
        return f"{self._name}.{self._family.names.get(module, module)}"

    def _norm(self, name: str, size: int | None = None) -> np.ndarray:
        return read_norm(self._reader, self._family, self._full(name), size or self._hidden)

    def _norm_gate(self, kind: str, rank: int) -> NormGate | None:
        """The gate of the norm of the attention's or of the MLP's input, if there is one."""
        if not rank:
            return None
        name, hidden = self._full(f"{kind}_norm_gate"), self._hidden
        down, up = (
            self._reader.linear(f"{name}.{part}", shape, False)
            for part, shape in (("fc1", (rank, hidden)), ("fc2", (hidden, rank)))
        )
        return NormGate(down, up)

    def _head_norms(self, name: str, count: int, order: np.ndarray | None) -> np.ndarray:
        """The weights of the norms of all heads, `[count * head_dim]`, which are stored as one
        tensor (Command R+) or as one per head (StableLM 2)."""
        assert self._spec.attention is not None, "the norms of its heads"
        dim, full = self._spec.attention.head_dim, self._full(name)
        if self._reader.has(f"{full}.norms.0.weight"):
            parts = [self._reader.vector(f"{full}.norms.{i}.weight", dim) for i in range(count)]
            norms = np.concatenate(parts)
        else:
            norms = self._reader.tensor(f"{full}.weight", (count, dim)).ravel()
        return norms if order is None else norms[order]

    def _head_bias(self, name: str, weight: np.ndarray | None) -> np.ndarray:
        """The bias of a norm of queries or keys."""
        size = 0 if weight is None else len(weight)
        return self._reader.vector(f"{self._full(name)}.bias", size)

    def _norm_bias(self, name: str) -> np.ndarray:
        return self._reader.vector(f"{self._full(name)}.bias", self._hidden)

    def _attention(self, shape: Attention) -> tuple[Linear, Linear, Linear, Linear]:
        q_size = shape.num_heads * self._spec.query_dim
        sizes = {
            "self_attn.q_proj": q_size,
            "self_attn.k_proj": shape.num_kv_heads * (shape.head_dim - self._spec.has_key_bias),
            "self_attn.v_proj": shape.num_kv_heads * shape.value_dim,
        }
        bias = bool_value(self._config, "attention_bias")
        q, k, v = self._parts(
            "self_attn.qkv_proj",
            sizes,
            bias or bool_value(self._config, "qkv_bias", self._family.qkv_bias),
            {
                "self_attn.q_proj": self._spec.query_order(),
                "self_attn.k_proj": self._spec.key_order(),
                "self_attn.v_proj": self._spec.value_order(),
            },
            shards=int_value(self._config, "qkv_shards", 1),
        )
        output_bias = bool_value(
            self._config, "attention_out_bias", bias and self._family.output_bias
        )
        out_size = q_size if shape.value_size is None else shape.num_heads * shape.value_size
        name = self._full("self_attn.o_proj")
        return q, k, v, self._reader.linear(name, (self._hidden, out_size), output_bias)

    def _mlp(self) -> GatedMlp | PlainMlp | Experts:
        if is_expert_layer(self._config, self._index):
            family, shape = self._family, (self._spec.num_experts, self._hidden)
            experts = read_experts(self._reader, self._config, family, self._name, shape)
            if family.moe is None or not family.moe.has_norms:
                return experts
            mlp = self._dense_mlp()
            assert isinstance(mlp, GatedMlp), "the MLPs of this family"
            experts.shared = mlp
            experts.norms = read_expert_norms(self._reader, self._name, self._hidden)
            return experts
        return self._dense_mlp()

    def _xielu(self) -> Xielu:
        """The activation, of which the checkpoint has the inverse softplus of two factors."""
        name = self._full("mlp.act_fn")
        positive, negative = (
            float(np.float32(portable.softplus(self._reader.vector(f"{name}.alpha_{sign}", 1)[0])))
            for sign in "pn"
        )
        beta, eps = (float(self._reader.tensor(f"{name}.{part}", ())) for part in ("beta", "eps"))
        return Xielu(positive, beta + negative, beta, eps)

    def _dense_mlp(self) -> GatedMlp | PlainMlp:
        inner = int_value(self._config, "intermediate_size")
        bias = bool_value(self._config, "mlp_bias")
        out_bias = bool_value(self._config, "mlp_out_bias", bias)
        if self._spec.mlp == "plain":
            name = self._full("mlp.up_proj")
            up = self._reader.linear(name, (inner, self._hidden), bias)
            return PlainMlp(up, self._down(inner, out_bias))
        gate, up = self._parts(
            "mlp.gate_up_proj", {"mlp.gate_proj": inner, "mlp.up_proj": inner}, bias
        )
        return GatedMlp(gate, up, self._down(inner, out_bias))

    def _down(self, inner: int, bias: bool) -> Linear:
        return self._reader.linear(self._full("mlp.down_proj"), (self._hidden, inner), bias)

    def _parts(
        self,
        fused: str,
        sizes: dict[str, int],
        bias: bool,
        orders: Mapping[str, np.ndarray | None] = MappingProxyType({}),
        shards: int = 1,
    ) -> list[Linear]:
        """Matrices that a checkpoint stores separately, or as rows of one fused matrix: of one
        after the other in each of its `shards` equal parts."""
        reader, hidden, fused = self._reader, self._hidden, self._full(fused)
        if not reader.has(f"{fused}.weight"):
            return [
                reader.linear(self._full(name), (size, hidden), bias, rows=orders.get(name))
                for name, size in sizes.items()
            ]
        total, start, parts = sum(sizes.values()), 0, []
        for name, size in sizes.items():
            if size % shards:
                raise refusal(f"the rows of {self._full(name)}", size, f"a multiple of {shards}")
            order = orders.get(name)
            rows: slice | np.ndarray = slice(start, start + size)
            if order is not None or shards > 1:
                first = np.arange(size // shards) + start // shards
                found = (np.arange(shards)[:, None] * (total // shards) + first).ravel()
                rows = found if order is None else found[order]
            alias = self._full(name)
            parts.append(reader.linear(fused, (total, hidden), bias, rows=rows, alias=alias))
            start += size
        return parts
