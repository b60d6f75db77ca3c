"""The transformer, written once against `Backend`.

An eager backend computes each operation. A recording backend records the operations of a range of
layers and runs them in one call later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from anydecode.errors import CheckpointError, UnsupportedCombinationError
from anydecode.kernels.formats import check_weight
from anydecode.kernels.interface import (
    TIME_MIX_RULES,
    Adapter,
    Attention,
    AtTime,
    Backend,
    Biases,
    CanvasLayers,
    ExpertWeights,
    ParallelLayers,
    PropagatedStates,
    Recurrence,
    RecurrenceWeights,
    RelativePositions,
    Rope,
    SkippedParts,
    StoredInputs,
    Variant,
    Weight,
    Xielu,
)
from anydecode.models.attention_experts import AttentionExperts
from anydecode.models.block_residuals import BlockResiduals, weighted_sum, with_stream
from anydecode.models.convolved_attention import ConvolvedAttention
from anydecode.models.differential import DifferentialWeights
from anydecode.models.gated_streams import StreamGates
from anydecode.models.hyper import HyperWeights
from anydecode.models.key_bias import KeyBias
from anydecode.models.limits import MAX_FACTOR, number
from anydecode.models.linear import Linear
from anydecode.models.memory_unit import MemoryUnit
from anydecode.models.mlstm import Mlstm
from anydecode.models.ngrams import NgramWeights
from anydecode.models.norm_gate import NormGate
from anydecode.models.per_layer import PerLayerBlock, PerLayerEmbeddings
from anydecode.models.query_scale import QueryScale
from anydecode.models.router_states import RouterStates
from anydecode.models.self_conditioning import PlainSelfConditioning, SelfConditioning
from anydecode.models.shared_key import EntryWeights, SharedKeyWeights
from anydecode.models.spec import (
    LatentSpec,
    LayerSpec,
    LowRankQuery,
    ModelSpec,
    RecurrentSpec,
)
from anydecode.models.states import StateWeights
from anydecode.models.streams import (
    StreamBlock,
    StreamProjections,
    Sublayers,
    as_first_stream,
    equal_streams,
    mean_of_streams,
)
from anydecode.models.time_conditioning import (
    InputModulation,
    SharedTimeConditioning,
    TimeConditioning,
)
from anydecode.models.time_mix import DynamicMixWeights, TimeMix, TimeMixWeights


@dataclass(eq=False)
class GatedMlp:
    """down(activation(gate(x)) * up(x))"""

    gate: Linear
    up: Linear
    down: Linear


@dataclass(eq=False)
class PlainMlp:
    """down(activation(up(x)))"""

    up: Linear
    down: Linear


@dataclass(eq=False)
class ExpertNorms:
    """The norms of routed experts that run beside an MLP (Gemma 4), float32 `[hidden_size]`: of the
    inputs of router and experts, and of the outputs of the experts and of the MLP."""

    router: np.ndarray
    input: np.ndarray
    output: np.ndarray
    shared: np.ndarray


class RmsNorm(NamedTuple):
    """The weights of an RMS norm, float32, and its epsilon."""

    weight: np.ndarray
    eps: float


@dataclass(eq=False)
class Experts:
    """A router `[experts, hidden_size]` and its experts.

    `shared` is an MLP that every token runs through. Its output is added, multiplied by the sigmoid
    of the product with `shared_gate` `[1, hidden_size]` if there is one. With `norms`, router and
    experts read the hidden states without the norm of the layer's MLP, which `shared` is. With
    `latent_down` `[latent size, hidden_size]` the experts read its product, normed if there is
    `latent_norm`, and `latent_up` is applied to the sum of their outputs (Nemotron-H), normed if
    there is `latent_output_norm` (Kimi K3). Where the
    router gives the weights ("given"), these are relu(router(x)), normed by `router_norm`. `bias`
    `[1, hidden_size]` is added to the sum of the experts' outputs (Nomic BERT). The router's
    outputs are limited by the tangent function to `router_softcap` (Grok). With `input_norm` router
    and experts read the normed inputs of the layer (Arctic). `adjugate` are the further experts of
    groups, whose outputs are added (GroveMoE).
    """

    router: Linear
    routed: ExpertWeights
    shared: GatedMlp | PlainMlp | None = None
    shared_gate: Weight | None = None
    norms: ExpertNorms | None = None
    latent_down: Linear | None = None
    latent_up: Linear | None = None
    latent_norm: RmsNorm | None = None
    latent_output_norm: RmsNorm | None = None
    router_norm: RmsNorm | None = None
    bias: Weight | None = None
    router_softcap: float | None = None
    input_norm: RmsNorm | None = None
    adjugate: ExpertWeights | None = None


@dataclass(eq=False)
class RecurrentWeights:
    """The weights of a recurrent sublayer.

    output(gate(x) * recurrence(input_gate(x) * inputs(x), gates(x))), see `RecurrentSpec`. With
    the rule "selective" the gates are keys(c), queries(c) and gates(step_down(c)), where c is the
    output of the convolution; `gate_norms` are the weights of the norms of keys, queries and
    step_down, if these have some. With the rule "lru" they are the products of its equal parts with
    `input_blocks`, and those with `recurrence_blocks`, both side by side. With the rule "kda", and
    with the rule "delta" if there are keys, the inputs of the recurrence are inputs(x), keys(x) and
    queries(x), side by side. With "kda" the gates are strengths(x) and gates(step_down(x)), or
    gates(x) without `step_down`. The gate of the output is gate(gate_down(x)) if there is
    `gate_down`.
    """

    inputs: Linear
    gate: Linear
    output: Linear
    vectors: RecurrenceWeights
    gates: Linear | None = None
    input_gate: Linear | None = None
    norm: np.ndarray | None = None
    keys: Linear | None = None
    queries: Linear | None = None
    step_down: Linear | None = None
    strengths: Linear | None = None
    gate_down: Linear | None = None
    gate_norms: list[np.ndarray] = field(default_factory=list)
    input_blocks: list[Weight] = field(default_factory=list)
    recurrence_blocks: list[Weight] = field(default_factory=list)

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix of the sublayer."""
        linears = [value for value in vars(self).values() if isinstance(value, Linear)]
        blocks = [*self.input_blocks, *self.recurrence_blocks]
        return [weight for linear in linears for weight in linear.matrices] + blocks


@dataclass(eq=False)
class LatentWeights:
    """The weights of latent attention beside `LayerWeights.query`, `LayerWeights.key`
    `[head_dim, hidden_size]` and `LayerWeights.output`; see `LatentSpec`. The norm is float32;
    layers that attend to the latents of an earlier one have none.

    `keys` and `values` have a matrix `[latent_dim, key_dim]` and `[value_dim, latent_dim]` per
    head. `rotary_norm` is that of the rest of the key.
    """

    norm: np.ndarray | None
    keys: list[Weight]
    values: list[Weight]
    rotary_norm: np.ndarray | None = None

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        return [*self.keys, *self.values]


@dataclass(eq=False)
class IndexerWeights:
    """The weights of an indexer, see `IndexerSpec`.

    `query` reads the normed inner numbers of `LayerSpec.low_rank_query`, or the attention's inputs
    where there are none; `key` and `weights`, which gives one number per head, read these too. The
    norms are float32 `[head_dim]`: of keys, which may have a bias, and of queries, if they have
    one. The key may be that of an entry, which is normed, or that of a block, whose values are.
    With `IndexerSpec.has_own_query` the inputs of `query` have a layer norm, float32
    `[hidden_size]`, and its products have factors.
    """

    query: Linear
    key: Linear | EntryWeights
    norm: np.ndarray
    weights: Linear | None = None
    norm_bias: np.ndarray | None = None
    query_norm: np.ndarray | None = None
    input_norm: np.ndarray | None = None
    input_norm_bias: np.ndarray | None = None
    query_scale: QueryScale | None = None

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        parts = (self.query, self.key, self.weights)
        return [weight for part in parts if part is not None for weight in part.matrices]


@dataclass(eq=False)
class MarkovHead:
    """A bias of the logits of a block's slot that depends on the token before (DSpark).

    `network` has no layers: its embedding is the first matrix `[vocab_size, rank]`, its head the
    second `[num_logits, rank]`. `kind` says what is between them: nothing ("vanilla"), a gate of
    the slot's hidden state ("gated"), or a recurrence over the slots ("rnn"), with the matrix `mix`
    and its bias, float32.
    """

    kind: str
    network: Network
    mix: np.ndarray | None = None
    mix_bias: np.ndarray | None = None

    @property
    def rank(self) -> int:
        return self.network.spec.hidden_size


@dataclass(eq=False)
class PrefixHead:
    """A bias of the logits of a block's slot that depends on all tokens of the block before it
    (Domino). A gated recurrent unit reads their embeddings. Its state behind the slot's hidden
    state is multiplied by `mix`, activated by SiLU, and multiplied by the head of `network`.

    Args:
        network: Without layers; its head is `[num_logits, rank]`.
        inputs: What the unit's reset gate, update gate and candidate read of an embedding, float32
            `[3 * width, hidden_size]`.
        states: The same of its state, float32 `[3 * width, width]`.
        mix: Float32 `[rank, hidden_size + width]`.
        num_free: The number of first slots without a bias.
    """

    network: Network
    inputs: np.ndarray
    states: np.ndarray
    mix: np.ndarray
    num_free: int = 0


@dataclass(eq=False)
class SelectorHead:
    """Chooses among the `top_k` most probable tokens of a block's slot (DFlash2): each gets the sum
    of the products of its row of `successors`, of the row of the token before in `predecessors`,
    both `[vocab_size, rank]`, and of `hidden`, float32 `[rank, hidden_size]`, times the slot's
    hidden state. Other tokens are left out."""

    predecessors: Weight
    successors: Weight
    hidden: np.ndarray
    top_k: int


class ConfidenceHead(NamedTuple):
    """The logit of the probability that a slot's token is accepted: the product of `weight`,
    float32, with the slot's hidden state, followed by the embedding of the Markov head if it is
    longer, plus `bias`."""

    weight: np.ndarray
    bias: float


@dataclass(eq=False)
class SideOutput:
    """What a side layer adds to the first stream: the product of `projection`
    `[hidden_size, hidden_size]` with its output, normed by `norm`, float32 `[hidden_size]`. A layer
    that reads the embeddings adds the product with the output of its MLP for the recurrence, whose
    inputs `norm` norms."""

    norm: np.ndarray
    projection: Linear


@dataclass(eq=False)
class UnmaskingHead:
    """The confidence of a row's token (RemeDi): `head` of the second stream after the last layer,
    normed by `norm`, float32 `[hidden_size]`."""

    norm: np.ndarray
    head: ConfidenceHead


@dataclass(eq=False)
class BlockHeads:
    """What a block drafter computes slot by slot after its pass."""

    markov: MarkovHead | None = None
    confidence: ConfidenceHead | None = None
    prefix: PrefixHead | None = None
    selector: SelectorHead | None = None


@dataclass(eq=False)
class BlockConvolution:
    """Convolutions of the inputs and of the outputs of a sublayer, within the blocks of a drafter
    that predicts blocks (DFlash2): see `Backend.block_convolution`. The product of `projection`
    `[2 * taps * groups, hidden_size]` with the inputs gives what the kernels of a row add to
    `base`, float32 `[2, taps, hidden_size]`."""

    projection: Linear
    base: np.ndarray
    mask_token: int

    def of_inputs(self, backend: Backend, x: Any) -> tuple[Any, Any]:
        """The convolved inputs, and the kernels of the outputs."""
        kernels, half = self.projection.apply(backend, x), self.projection.weight.out_features // 2
        first, second = backend.columns(kernels, 0, half), backend.columns(kernels, half, half)
        return backend.block_convolution(x, first, self.base[0], self.mask_token), second

    def of_outputs(self, backend: Backend, y: Any, kernels: Any) -> Any:
        """The convolved outputs."""
        return backend.block_convolution(y, kernels, self.base[1], self.mask_token)


#: The second sublayer of a layer.
Mlp = GatedMlp | PlainMlp | Experts


@dataclass(eq=False)
class LayerWeights:
    """The weights of one layer. Norm weights are float32. What `LayerSpec` does not have is
    None.

    With `LayerSpec.low_rank_query`, `query` reads the output of `query_down`, normed by
    `query_down_norm`.
    """

    query_down: Linear | None = None
    query_down_norm: np.ndarray | None = None
    query: Linear | None = None
    key: Linear | None = None
    value: Linear | None = None
    output: Linear | None = None
    mlp: Mlp | None = None
    attention_norm: np.ndarray | None = None
    attention_post_norm: np.ndarray | None = None
    mlp_norm: np.ndarray | None = None
    attention_norm_gate: NormGate | None = None
    mlp_norm_gate: NormGate | None = None
    mlp_post_norm: np.ndarray | None = None
    second_norm: np.ndarray | None = None  # of the attention's second sum
    second_norm_bias: np.ndarray | None = None
    attention_inner_norm: np.ndarray | None = None  # of the output matrix's input
    mlp_inner_norm: np.ndarray | None = None  # of the down matrix's input
    query_norm: np.ndarray | None = None
    key_norm: np.ndarray | None = None
    query_norm_bias: np.ndarray | None = None
    key_norm_bias: np.ndarray | None = None
    attention_norm_bias: np.ndarray | None = None
    mlp_norm_bias: np.ndarray | None = None
    attention_post_norm_bias: np.ndarray | None = None
    mlp_post_norm_bias: np.ndarray | None = None
    sinks: np.ndarray | None = None
    distance_biases: np.ndarray | None = None  # float32 [heads, 2 * bias_reach + 1]
    relative_positions: RelativePositions | None = None
    attention_gate: Linear | None = None
    recurrent: RecurrentWeights | TimeMix | Mlstm | None = None
    latent: LatentWeights | None = None
    indexer: IndexerWeights | None = None
    shared_key: SharedKeyWeights | None = None
    hyper: Sublayers[HyperWeights] | None = None
    residuals: BlockResiduals | None = None
    stream_gates: Sublayers[StreamGates] | None = None
    ngrams: NgramWeights | None = None
    per_layer: PerLayerBlock | None = None
    scale: float | None = None  # of the layer's output
    canvas_scale: float | None = None  # the same for rows of a canvas (`ModelSpec.has_canvas`)
    streams: StreamBlock | None = None
    differential: DifferentialWeights | None = None
    memory_unit: MemoryUnit | None = None
    side: SideOutput | None = None
    # Of a model that depends on the time of the diffusion, or with residual gates: factors of the
    # outputs of both sublayers before their norms, float32 [hidden_size].
    attention_factors: np.ndarray | None = None
    mlp_factors: np.ndarray | None = None
    # Factors of the inputs of both sublayers in their sums, float32 [hidden_size].
    attention_residual: np.ndarray | None = None
    mlp_residual: np.ndarray | None = None
    input_modulation: InputModulation | None = None  # the same for whole layers
    # The share of the position before in the MLP's inputs, float32 [hidden_size] (RWKV), and that
    # in the input of a product whose sigmoid multiplies the MLP's output (RWKV-6).
    mlp_mix: np.ndarray | None = None
    mlp_receptance_mix: np.ndarray | None = None
    mlp_receptance: Linear | None = None
    query_scale: QueryScale | None = None
    attention_experts: AttentionExperts | None = None  # in place of query and output
    key_bias: KeyBias | None = None
    convolved: ConvolvedAttention | None = None
    router_states: RouterStates | None = None
    # What is added to the sums of both sublayers' inputs and outputs, [1, hidden_size].
    attention_sum_bias: Weight | None = None
    mlp_sum_bias: Weight | None = None
    xielu: Xielu | None = None  # the activation of the MLP, where it is "xielu"
    attention_convolution: BlockConvolution | None = None
    mlp_convolution: BlockConvolution | None = None

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix of a product."""
        attention = (self.query_down, self.query, self.key, self.value, self.output)
        linears = [*attention, self.attention_gate, self.mlp_receptance]
        if self.per_layer is not None:
            linears += [self.per_layer.gate, self.per_layer.projection]
        weights = [] if self.streams is None else self.streams.matrices
        weights += [] if self.recurrent is None else self.recurrent.matrices
        if self.memory_unit is not None:
            linears += [self.memory_unit.gate, self.memory_unit.output]
        if self.side is not None:
            linears.append(self.side.projection)
        for convolution in (self.attention_convolution, self.mlp_convolution):
            linears += [] if convolution is None else [convolution.projection]
        weights += [one for linear in linears if linear is not None for one in linear.matrices]
        weights += [] if self.latent is None else self.latent.matrices
        gates = self.attention_norm_gate, self.mlp_norm_gate
        parts = self.attention_experts, self.key_bias, self.convolved, self.router_states
        streams = self.hyper, self.residuals, self.stream_gates, self.ngrams
        for part in (*parts, self.indexer, self.shared_key, *streams, *gates):
            weights += [] if part is None else part.matrices
        return weights + ([] if self.mlp is None else list(mlp_matrices(self.mlp)))


@dataclass(eq=False)
class ModelWeights:
    """All weights of a model. `head` is the same object as `embedding` if the two are tied."""

    embedding: Weight
    layers: list[LayerWeights]
    final_norm: np.ndarray | None
    head: Weight
    head_bias: np.ndarray | None = None
    final_norm_bias: np.ndarray | None = None
    position_table: Weight | None = None  # [max_positions, hidden_size]
    memory_start: Weight | None = None  # what the memory of the first layer is, [1, hidden_size]
    # What is added to the embeddings, [1, hidden_size], and factors of the sums, float32.
    input_bias: Weight | None = None
    input_factors: np.ndarray | None = None
    embedding_norm: np.ndarray | None = None
    embedding_norm_bias: np.ndarray | None = None
    head_dense: Linear | None = None  # in front of the head's matrix, and the norm of its output
    head_norm: np.ndarray | None = None
    segments: np.ndarray | None = None  # float32 [num_segments, hidden_size]
    per_layer: PerLayerEmbeddings | None = None
    streams: StreamProjections | None = None
    hyper: HyperWeights | None = None  # of the streams after the last layer
    residual_score: Weight | None = None  # of the sums of blocks there, see `BlockResiduals`
    stream_gates: StreamGates | None = None  # of the streams there
    states: StateWeights | None = None  # of a drafter that reads its target's states
    self_conditioning: SelfConditioning | PlainSelfConditioning | None = None
    head_tokens: np.ndarray | None = None  # int64 [head_size], the tokens of the head's rows
    block_heads: BlockHeads | None = None  # of a drafter that predicts blocks
    unmasking: UnmaskingHead | None = None
    time: TimeConditioning | SharedTimeConditioning | None = None

    def at_time(self, value: float) -> ModelWeights:
        """The same matrices with the norms and factors of another time of the diffusion; the
        embedding of times receives `value`."""
        assert self.time is not None, "a model that depends on the time"
        modulations, (norm, norm_bias) = self.time.at(value)
        pairs = zip(self.layers, modulations, strict=True)
        layers = [replace(layer, **modulation._asdict()) for layer, modulation in pairs]
        return replace(self, layers=layers, final_norm=norm, final_norm_bias=norm_bias)

    @property
    def tables(self) -> list[Weight]:
        """Every matrix of which rows are read, but for the embedding."""
        tables = [] if self.position_table is None else [self.position_table]
        own = None if self.per_layer is None else self.per_layer.table
        tables += [] if own is None else [own]
        return tables + [one.ngrams.table for one in self.layers if one.ngrams is not None]


@dataclass(eq=False)
class Network:
    """A spec with its weights and adapters.

    `layer` and `head` define the computation. Their values have the type that the operations of the
    given backend take and return.
    """

    spec: ModelSpec
    weights: ModelWeights
    adapters: list[Adapter] = field(default_factory=list)
    packed: tuple[Weight, ...] = ()  # weights of another network, which an executor has packed

    def __post_init__(self) -> None:
        """Raise CheckpointError if the shape of a matrix, bias or norm does not match the spec."""
        spec, weights = self.spec, self.weights
        if len(weights.layers) != spec.num_layers:
            raise CheckpointError(
                f"the weights have {len(weights.layers)} layers, the spec has {spec.num_layers}"
            )
        outer = (spec.vocab_size, spec.hidden_size)
        if weights.embedding not in self.packed:
            _check_matrix("the embedding", weights.embedding, outer)
        size = (spec.num_logits, spec.hidden_size)
        if weights.head not in self.packed:
            _check_linear("the head", Linear(weights.head, weights.head_bias), size)
        _check_head_tokens(spec, weights.head_tokens)
        _check_states(spec, weights.states)
        if spec.has_final_norm:
            _check_vector("the final norm", weights.final_norm, spec.hidden_size)
        if spec.has_embedding_norm:
            _check_vector("the embedding norm", weights.embedding_norm, spec.hidden_size)
        _check_bias("the embedding norm's bias", weights.embedding_norm_bias, spec.hidden_size)
        if (spec.head_activation is None) != (weights.head_dense is None):
            raise CheckpointError(
                "only one of the spec and the weights has a matrix before the head"
            )
        if weights.head_dense is not None:
            _check_linear("head_dense", weights.head_dense, (spec.hidden_size, spec.hidden_size))
            _check_vector("the norm of the head", weights.head_norm, spec.hidden_size)
        if spec.num_segments:
            table = None if weights.segments is None else weights.segments.ravel()
            _check_vector("the token types", table, spec.num_segments * spec.hidden_size)
        _check_bias("the final norm's bias", weights.final_norm_bias, spec.hidden_size)
        if weights.position_table is not None:
            table_shape = (spec.max_positions, spec.hidden_size)
            _check_matrix("the position table", weights.position_table, table_shape)
        if spec.has_position_table != (weights.position_table is not None):
            raise CheckpointError("only one of the spec and the weights has a position table")
        _check_per_layer(spec, weights.per_layer)
        _check_streams(spec, weights.streams)
        if (weights.hyper is None) != (spec.hyper is None or spec.hyper.has_mean):
            raise CheckpointError("only one of the spec and the weights sums the last streams")
        _check_hyper("", spec, weights.hyper, spec.num_streams)
        _check_residuals(spec, weights)
        _check_stream_gates(spec, weights)
        for index, (shape, layer) in enumerate(zip(spec.layers, weights.layers, strict=True)):
            if any(weight in self.packed for weight in layer.matrices):
                continue  # of another network, which has checked it
            width = spec.hidden_size
            if (index == 0 and spec.attends_to_states) or shape.memory == "embeddings":
                width *= 2
            _check_layer(f"layer {index}, ", shape, layer, spec.hidden_size, width)
            _check_mixes(f"layer {index}, ", shape, layer, spec.hidden_size, index == 0)
            sizes = spec.hidden_size, spec.memory_size
            _check_router_states(f"layer {index}, ", shape, layer, *sizes, index == 0)
            _check_per_layer_block(f"layer {index}, ", spec, layer.per_layer)
            if layer.memory_unit is not None:
                _check_memory_unit(f"layer {index}, ", spec, layer.memory_unit)
            _check_stream_block(f"layer {index}, ", spec, layer.streams)
            if (layer.hyper is None) != (spec.hyper is None):
                raise CheckpointError("only one of the spec and the weights has hyper-connections")
            for part in () if layer.hyper is None else (layer.hyper.mixer, layer.hyper.mlp):
                rows = 0 if spec.hyper is None else spec.hyper.num_factors(spec.num_streams)
                _check_hyper(f"layer {index}, ", spec, part, rows)

    @property
    def width(self) -> int:
        """Numbers per hidden state between layers."""
        return self.spec.hidden_size + self.spec.extra_width

    @property
    def has_wide_states(self) -> bool:
        """Whether hidden states have more than `hidden_size` numbers."""
        return self.width > self.spec.hidden_size

    @property
    def carries_states(self) -> bool:
        """Whether a drafter's hidden state is the state of the next token as it is."""
        states, starts = self.spec.states, self.spec.starts_from_states
        if states is None or states.joins == "cross":
            return False
        is_next = states.stride == 1
        return starts and is_next and not states.feeds_normed and not states.num_heads

    def matrices(self) -> Iterator[Weight]:
        """Yield the embedding and every matrix of a product; tied ones may be yielded twice."""
        yield self.weights.embedding
        yield self.weights.head
        if self.weights.head_dense is not None:
            yield from self.weights.head_dense.matrices
        if self.weights.per_layer is not None:
            yield self.weights.per_layer.projection.weight
        if self.weights.streams is not None:
            yield from self.weights.streams.matrices
        if self.weights.hyper is not None:
            yield from self.weights.hyper.matrices
        if self.weights.residual_score is not None:
            yield self.weights.residual_score
        if self.weights.stream_gates is not None:
            yield from self.weights.stream_gates.matrices
        if self.weights.states is not None:
            yield from self.weights.states.matrices
        for layer in self.weights.layers:
            yield from layer.matrices

    def release_matrices(self) -> None:
        """Free the matrices' data, after an executor has packed its own copy."""
        for weight in (*self.matrices(), *self.weights.tables):
            weight.free()

    def layer(self, backend: Backend, x: Any, index: int) -> Any:
        """The hidden states after layer `index`, from those before it."""
        x = self._inputs(backend, x, index)
        if self.spec.hyper is not None:
            return self._layer_of_hyper_connections(backend, x, index)
        if self.spec.residual_block:
            return self._layer_of_blocks(backend, x, index)
        if self.spec.stream_gate_rank:
            return self._layer_of_gated_streams(backend, x, index)
        if self.spec.num_streams > 1:
            return self._layer_of_streams(backend, x, index)
        if self.spec.memory_size:
            return self._layer_with_memory(backend, x, index)
        if self.spec.layers[index].sum_factors is not None:
            return self._layer_of_normed_sums(backend, x, index)
        modulation = self.weights.layers[index].input_modulation
        if modulation is None:
            return self._add_blocks(backend, x, self._mixer_block(backend, x, index), index)
        y = backend.add_positions(backend.multiply(x, modulation.scale), modulation.shift)
        output = self._add_blocks(backend, y, self._mixer_block(backend, y, index), index)
        change = backend.add(output, backend.scale(y, -1.0))
        return backend.add(x, backend.multiply(change, modulation.gate))

    def _layer_of_normed_sums(self, backend: Backend, x: Any, index: int) -> Any:
        """The same where what is added to a sublayer's output is its normed input."""
        spec, weights = self.spec.layers[index], self.weights.layers[index]
        assert spec.sum_factors is not None and weights.mlp is not None, "checked by `LayerSpec`"
        first, mixed, second, fed = spec.sum_factors
        y = self._norm(backend, x, weights.attention_norm, weights.attention_norm_bias)
        output = self._mixer(backend, y, spec, weights, index)
        x = backend.add(backend.scale(y, first), backend.scale(output, mixed))
        y = self._norm(backend, x, weights.mlp_norm, weights.mlp_norm_bias)
        output = _mlp(backend, y, spec, weights.mlp)
        return backend.add(backend.scale(y, second), backend.scale(output, fed))

    def _layer_with_memory(self, backend: Backend, x: Any, index: int) -> Any:
        """The same where a memory follows the hidden states: the layer may read or replace it."""
        spec, weights, size = (
            self.spec.layers[index],
            self.weights.layers[index],
            self.spec.hidden_size,
        )
        memory = backend.columns(x, size, self.spec.memory_size)
        x = backend.columns(x, 0, size)
        if index == 0 and any(layer.memory == "embeddings" for layer in self.spec.layers):
            memory = x
        if spec.memory == "embeddings":
            return backend.join(self._after_shared_block(backend, x, memory, index), memory)
        if weights.side is not None:
            y = backend.add(x, memory)
            memory = self._add_blocks(backend, y, self._mixer_block(backend, y, index), index)
            y = backend.rms_norm(memory, weights.side.norm, self.spec.norm_eps)
            x = backend.add(x, weights.side.projection.apply(backend, y))
            return backend.join(x, memory)
        if weights.router_states is not None:
            return self._with_router_states(backend, x, memory, index)
        if spec.memory in ("joins", "swaps"):
            start = self.weights.memory_start
            memory = memory if index or start is None else backend.add_positions(memory, start)
            joined = backend.add(x, memory)
            x, memory = joined, x if spec.memory == "swaps" else memory
            x = self._add_blocks(backend, x, self._mixer_block(backend, x, index), index)
            return backend.join(x, memory)
        if spec.memory == "shortcut":
            x = backend.add(x, self._mixer_block(backend, x, index))
            return self._with_shortcut(backend, x, index)
        if spec.memory == "adds":
            x = self._add_blocks(backend, x, self._mixer_block(backend, x, index), index)
            return backend.join(backend.add(x, memory), memory)
        if spec.memory is None:
            mixed = self._mixer_block(backend, x, index)
        else:
            y = self._norm(backend, x, weights.attention_norm, weights.attention_norm_bias)
            if weights.memory_unit is not None:
                mixed = weights.memory_unit.apply(backend, y, memory)
            else:
                recurrent = weights.recurrent
                assert spec.recurrence is not None and isinstance(recurrent, RecurrentWeights)
                memory = self._ungated(backend, y, spec.recurrence, recurrent, index)
                mixed = self._gated(backend, y, memory, spec.recurrence, recurrent)
            mixed = self._scaled(backend, mixed)
        return backend.join(self._add_blocks(backend, x, mixed, index), memory)

    def _after_shared_block(self, backend: Backend, x: Any, embeddings: Any, index: int) -> Any:
        """x plus the output of the recurrence of layer `index`, whose inputs include the output of
        attention and MLP for x beside the embeddings."""
        spec, weights = self.spec.layers[index], self.weights.layers[index]
        assert spec.recurrence is not None and isinstance(weights.recurrent, RecurrentWeights)
        assert weights.side is not None and weights.mlp is not None, "checked by `_check_layer`"
        eps = self.spec.norm_eps
        y = backend.rms_norm(backend.join(x, embeddings), weights.attention_norm, eps)
        y = self._attention(backend, y, spec, weights, index)
        y = _mlp(backend, backend.rms_norm(y, weights.mlp_norm, eps), spec, weights.mlp)
        y = backend.add(x, weights.side.projection.apply(backend, y))
        y = backend.rms_norm(y, weights.side.norm, eps)
        return backend.add(
            x, self._recurrent(backend, y, spec.recurrence, weights.recurrent, index)
        )

    def _with_router_states(self, backend: Backend, x: Any, states: Any, index: int) -> Any:
        """The layer's output, and the states of its router from those of the layer before."""
        spec, weights = self.spec.layers[index], self.weights.layers[index]
        mlp, router = weights.mlp, weights.router_states
        assert isinstance(mlp, Experts) and router is not None, "checked by `_check_layer`"
        assert spec.routing is not None, "checked by `_check_mlp`"
        factors = self.weights.input_factors
        if index == 0 and factors is not None:
            x = backend.multiply(_shifted(backend, x, self.weights.input_bias), factors)
        y = self._mixer_block(backend, x, index)
        x = backend.add(_kept(backend, x, weights.attention_residual), y)
        x = _shifted(backend, x, weights.attention_sum_bias)
        y = self._norm(backend, x, weights.mlp_norm)
        states = router.state(backend, y, states)
        logits = mlp.router.apply(backend, router.inputs(backend, states))
        y = backend.experts(y, logits, mlp.routed, spec.routing, spec.activation)
        y = y if weights.mlp_factors is None else backend.multiply(y, weights.mlp_factors)
        x = backend.add(_kept(backend, x, weights.mlp_residual), y)
        return backend.join(_shifted(backend, x, weights.mlp_sum_bias), states)

    def _with_shortcut(self, backend: Backend, x: Any, index: int) -> Any:
        """x plus the output of the layer's MLP, and then that of the experts beside it."""
        spec, weights = self.spec.layers[index], self.weights.layers[index]
        mlp = weights.mlp
        assert isinstance(mlp, Experts) and mlp.shared is not None, "checked by `_check_mlp`"
        y = self._norm(backend, x, weights.mlp_norm, weights.mlp_norm_bias)
        routed = _mlp(backend, y, spec, replace(mlp, shared=None))
        return backend.join(backend.add(x, _mlp(backend, y, spec, mlp.shared)), routed)

    def _layer_of_streams(self, backend: Backend, x: Any, index: int) -> Any:
        """The same for several streams. After the last layer their mean takes the place of the
        first one, and the others are zero."""
        spec, model, weights = self.spec.layers[index], self.spec, self.weights.layers[index]
        block, projections = weights.streams, self.weights.streams
        assert block is not None and projections is not None, "checked by `_check_streams`"
        assert weights.per_layer is not None
        if index == 0:
            x = projections.expand(backend, backend.columns(x, 0, model.hidden_size))
        predicted = block.predict(backend, x, model)
        active = block.active(backend, predicted, model)
        y = backend.rms_norm(active, weights.attention_norm, model.norm_eps)
        residual = block.residual(backend, y, model.norm_eps)
        y = self._attention(backend, y, spec, weights, index)
        y = backend.rms_norm(y, weights.attention_post_norm, model.norm_eps)
        y = backend.add(backend.add(active, y), residual)
        y = backend.scale(y, 2**-0.5)
        y = backend.add(y, self._mlp_block(backend, y, index))
        x = block.correct(backend, predicted, y, model)
        inputs = self._per_layer_inputs(backend, index)
        x = block.add_embeddings(backend, x, weights.per_layer, inputs, model, spec)
        if index + 1 < model.num_layers:
            return x
        merged = projections.merge(backend, x, model.hidden_size)
        first = np.zeros(model.num_streams, np.float32)
        first[0] = 1.0
        return backend.spread(merged, first, model.num_streams)

    def _layer_of_hyper_connections(self, backend: Backend, x: Any, index: int) -> Any:
        """The same for streams with hyper-connections."""
        spec, hyper = self.spec, self.weights.layers[index].hyper
        assert hyper is not None, "checked by `_check_hyper`"
        if index == 0 and not spec.starts_from_states:
            x = equal_streams(backend, x, spec)
        for weights, block in ((hyper.mixer, self._mixer_block), (hyper.mlp, self._mlp_block)):
            x = weights.connect(backend, x, spec, partial(block, backend, index=index))
        return x

    def _layer_of_blocks(self, backend: Backend, x: Any, index: int) -> Any:
        """The same where sublayers read sums over blocks of layers. After the last layer such a sum
        takes the place of the first stream, and the others are zero."""
        spec, residuals = self.spec, self.weights.layers[index].residuals
        assert residuals is not None, "checked by `_check_residuals`"
        current = y = backend.columns(x, 0, spec.hidden_size)
        blocks, place = divmod(index, spec.residual_block)
        known = 1 + blocks + (place > 0)
        if residuals.mixer is not None:
            y = weighted_sum(backend, x, known, residuals.mixer, spec)
        mixed = self._mixer_block(backend, y, index)
        if place:
            current = backend.add(current, mixed)
        else:
            x, known = with_stream(backend, x, known, current, spec), known + 1
            current = mixed
        x = with_stream(backend, x, 0, current, spec)
        y = weighted_sum(backend, x, known, residuals.mlp, spec)
        x = with_stream(
            backend, x, 0, backend.add(current, self._mlp_block(backend, y, index)), spec
        )
        if index + 1 < spec.num_layers:
            return x
        score = self.weights.residual_score
        assert score is not None, "checked by `_check_residuals`"
        last = weighted_sum(backend, x, spec.num_streams, score, spec)
        return as_first_stream(backend, last, spec)

    def _layer_of_gated_streams(self, backend: Backend, x: Any, index: int) -> Any:
        """The same for streams that sublayers read through gates. A drafter's first layer reads the
        streams of its states."""
        spec, weights = self.spec, self.weights.layers[index]
        if index == 0 and spec.states is None:
            x = equal_streams(backend, x, spec)
        if weights.ngrams is not None:
            recurrence = spec.layers[index].recurrence
            assert recurrence is not None, "checked by `ModelSpec`"
            return weights.ngrams.apply(backend, x, index, recurrence.shape, spec)
        gates = weights.stream_gates
        assert gates is not None, "checked by `_check_stream_gates`"
        for own, block in ((gates.mixer, self._mixer_block), (gates.mlp, self._mlp_block)):
            y, factors = own.read(backend, x, spec)
            y = block(backend, y, index)
            x = backend.add(x, backend.spread(y, factors, spec.num_streams))
        return x

    def _inputs(self, backend: Backend, x: Any, index: int) -> Any:
        """The inputs of layer `index`; those of the first layer include position embeddings, and
        are normed if embeddings are. Those of a drafter may include its tokens' embeddings."""
        weights = self.weights
        if index:
            return x
        if weights.states is not None and self.spec.starts_from_states:
            return weights.states.inputs(backend, x, weights.embedding, self.spec)
        if weights.position_table is not None:
            x = backend.add_positions(x, weights.position_table)
        if self.spec.has_embedding_norm:
            x = self._norm(backend, x, weights.embedding_norm, weights.embedding_norm_bias)
        return x

    def _add_blocks(self, backend: Backend, x: Any, mixed: Any, index: int) -> Any:
        """x plus the output of layer `index`'s first sublayer (None: it has none), plus that of its
        MLP; each sum is normed if the layer's norms are those of sums."""
        spec, weights = self.spec.layers[index], self.weights.layers[index]
        is_normed = spec.norms == "sum"
        state = x
        if mixed is not None:
            state = backend.add(_kept(backend, x, weights.attention_residual), mixed)
        if is_normed and mixed is not None:
            norm, bias = weights.attention_post_norm, weights.attention_post_norm_bias
            state = self._norm(backend, state, norm, bias)
            if spec.has_second_sum:
                norm, bias = weights.second_norm, weights.second_norm_bias
                state = self._norm(backend, backend.add(x, state), norm, bias)
        if weights.mlp is not None:
            y = self._mlp_block(backend, x if spec.is_parallel else state, index, x)
            state = backend.add(_kept(backend, state, weights.mlp_residual), y)
            if is_normed:
                norm, bias = weights.mlp_post_norm, weights.mlp_post_norm_bias
                state = self._norm(backend, state, norm, bias)
        if weights.per_layer is not None:
            inputs, eps = self._per_layer_inputs(backend, index), self.spec.norm_eps
            y = weights.per_layer.apply(backend, state, inputs, spec.activation, eps)
            state = backend.add(state, y)
        state = state if weights.scale is None else backend.scale(state, weights.scale)
        return self.final_norm(backend, state) if spec.ends_loop else state

    def _per_layer_inputs(self, backend: Backend, index: int) -> Any:
        """The embeddings of each row's token for layer `index`."""
        weights, spec, size = self.weights, self.spec, self.spec.per_layer_size
        assert weights.per_layer is not None, "checked by `_check_per_layer`"
        compute = partial(weights.per_layer.inputs, backend, weights.embedding, spec)
        return backend.columns(backend.shared(weights.per_layer, compute), index * size, size)

    def variant(
        self, variant: Variant
    ) -> tuple[Callable[[Backend, Any, int], Any], Callable[[Backend, Any], Any] | None]:
        """The replacements for `layer` and `head` that `variant` names; None: the same head.

        Raises:
            UnsupportedCombinationError: The layers have no such variant.
        """
        if isinstance(variant, StoredInputs):
            return self.storing_layer, None
        if isinstance(variant, PropagatedStates):
            self._check_plain_layers()
            return self.propagating_layer, None
        if isinstance(variant, ParallelLayers):
            return self.parallel_layers(variant.size), None
        if isinstance(variant, CanvasLayers):
            return self.canvas_layers().layer, None
        if isinstance(variant, AtTime):
            network = self.at_time(variant.value)
            return network.layer, network.head
        assert isinstance(variant, SkippedParts), "routes run ranges of layers"
        return self.skipping_layers(variant), None

    def at_time(self, value: float) -> Network:
        """The network at a time of the diffusion, over the same matrices and cache; the embedding
        of times receives `value`."""
        weights = self.weights.at_time(value)
        return Network(self.spec, weights, self.adapters, tuple(self.matrices()))

    def canvas_layers(self) -> Network:
        """The network of rows of a block that is being denoised (DiffusionGemma), over the same
        matrices and cache: the scales of its layers are those of the canvas, and there are no
        windows, since their spans list what these rows see (`CanvasSpan.windowed_from`)."""
        shapes = [
            layer
            if layer.attention is None
            else replace(layer, attention=replace(layer.attention, window=None))
            for layer in self.spec.layers
        ]
        layers = [replace(layer, scale=layer.canvas_scale) for layer in self.weights.layers]
        weights = replace(self.weights, layers=layers)
        packed = tuple(self.matrices())  # they have been checked
        return Network(replace(self.spec, layers=tuple(shapes)), weights, self.adapters, packed)

    def storing_layer(self, backend: Backend, x: Any, index: int) -> Any:
        """Store the keys and values that layer `index` makes of x itself, without its norm, and
        return x: a context that every layer attends to (DFlash)."""
        spec, weights = self.spec.layers[index], self.weights.layers[index]
        assert spec.attention is not None
        k, v = self._keys_values(backend, x, spec, weights, spec.attention)
        self._store(backend, x, (k, v), spec, weights, index)
        return x

    def propagating_layer(self, backend: Backend, x: Any, index: int) -> Any:
        """Store what layer `index` makes of x, its norm included, and return x: rows that have left
        the model at an earlier layer stay visible in the later ones."""
        spec, weights = self.spec.layers[index], self.weights.layers[index]
        y = x
        if spec.has_attention_norm and spec.norms in ("pre", "both"):
            y = self._mixer_input(backend, x, weights)
        if spec.recurrence is not None:
            assert isinstance(weights.recurrent, RecurrentWeights), "checked above"
            self._ungated(backend, y, spec.recurrence, weights.recurrent, index)
        if spec.attention is not None and spec.cache_layer is None:
            k, v = self._keys_values(backend, y, spec, weights, spec.attention)
            self._store(backend, y, (k, v), spec, weights, index)
        return x

    def skipping_layers(self, skipped: SkippedParts) -> Callable[[Backend, Any, int], Any]:
        """A replacement for `layer` without some of its sublayers."""
        self._check_plain_layers()
        skips = [self.spec.layers[index] for index in skipped.mixers | skipped.mlps]
        if any(spec.norms == "sum" or spec.is_parallel for spec in skips):
            raise UnsupportedCombinationError(
                "layers whose sublayers run side by side or norm their sums are not skipped in part"
            )

        def layer(backend: Backend, x: Any, index: int) -> Any:
            skips_mixer, skips_mlp = index in skipped.mixers, index in skipped.mlps
            x = inputs = self._inputs(backend, x, index)
            if not skips_mixer:
                mixed = self._mixer_block(backend, x, index)
                x = x if mixed is None else backend.add(x, mixed)
            if not skips_mlp and self.weights.layers[index].mlp is not None:
                x = backend.add(x, self._mlp_block(backend, x, index, inputs))
            return x

        return layer

    def _check_plain_layers(self) -> None:
        """Raise UnsupportedCombinationError if parts of the layers cannot be left out."""
        is_plain = all(
            spec.latent is None
            and spec.sum_factors is None
            and not spec.has_residual_gates
            and not spec.ends_loop
            and (
                spec.recurrence is None
                or spec.recurrence.shape.rule not in (*TIME_MIX_RULES, "mlstm")
            )
            for spec in self.spec.layers
        )
        if self.has_wide_states or self.spec.per_layer_size or not is_plain:
            raise UnsupportedCombinationError(
                "layers of models with latent attention, several streams of hidden states,"
                " embeddings per layer, sums of normed inputs, residual gates, token shifts or"
                " layers that run several times are not left out in part"
            )

    def parallel_layers(self, size: int) -> Callable[[Backend, Any, int], Any]:
        """A replacement for `layer` that runs layers in parallel groups of `size`, except the first
        and the last layer (Wu et al., EasySpec, arXiv:2502.02493).

        The attention of every layer of a group reads the hidden states before the group. The
        attention outputs and MLPs of the layers are then added one after the other. The call for
        the first layer of a group computes the whole group; the calls for the others return their
        input.
        """
        if self.has_wide_states:
            raise UnsupportedCombinationError(
                "layers of models with several streams of hidden states (Gemma 3n) or a memory"
                " (SambaY) do not run in parallel (easyspec)"
            )
        if any(layer.sum_factors is not None for layer in self.spec.layers):
            raise UnsupportedCombinationError(
                "layers whose inputs are added as normed (MiniMax-Text-01) do not run in parallel"
                " (easyspec)"
            )
        last = self.spec.num_layers - 1

        def layer(backend: Backend, x: Any, index: int) -> Any:
            if index in (0, last):
                return self.layer(backend, x, index)
            if (index - 1) % size:
                return x
            group = range(index, min(index + size, last))
            mixer_outputs = [self._mixer_block(backend, x, member) for member in group]
            for member, y in zip(group, mixer_outputs, strict=True):
                x = self._add_blocks(backend, x, y, member)
            return x

        return layer

    def queries(self, backend: Backend, x: Any, index: int) -> Any:
        """The attention queries of layer `index` for hidden states `x`, with rotary embedding."""
        spec, weights = self.spec.layers[index], self.weights.layers[index]
        y = self._inputs(backend, x, index)
        if spec.has_attention_norm and spec.norms in ("pre", "both", "stream"):
            y = self._mixer_input(backend, y, weights)
        return self._queries(backend, _query_inputs(backend, y, spec, weights), spec, weights)

    def _queries(self, backend: Backend, x: Any, spec: LayerSpec, weights: LayerWeights) -> Any:
        """The attention queries for the inputs x of their matrix."""
        assert spec.attention is not None
        heads, rope = spec.attention.num_heads, spec.query_rope or spec.rope
        if weights.attention_experts is not None:
            q = weights.attention_experts.query(backend, x, spec)
            return self._positioned(backend, q, spec, heads, (None, None), rope)
        assert weights.query is not None, "checked by `_check_attention`"
        if spec.latent is None:
            q = _limited(backend, weights.query.apply(backend, x), spec)
            norm = weights.query_norm, weights.query_norm_bias
            q = self._positioned(backend, q, spec, heads, norm, rope)
            bias = weights.key_bias
            return q if bias is None else bias.queries(backend, q, spec.attention)
        latent = weights.latent
        assert latent is not None, "checked by `_check_latent`"
        q = weights.query.apply(backend, x)
        if weights.query_scale is not None:
            q = weights.query_scale.apply(backend, q, spec.query_dim)
        if spec.query_dim == spec.latent.key_dim:
            return backend.grouped_linear(q, latent.keys)
        q, rotary = backend.split(q, spec.latent.key_dim, heads)
        if spec.latent.growth is not None:
            q = backend.rope(q, heads, spec.latent.growth)
        q = backend.grouped_linear(q, latent.keys)
        rotary = rotary if rope is None else backend.rope(rotary, heads, rope)
        return backend.join(q, rotary, heads)

    def _mixer_block(self, backend: Backend, x: Any, index: int) -> Any:
        """The first sublayer of a layer without its residual connection, norms included; None if it
        has none."""
        spec, weights = self.spec.layers[index], self.weights.layers[index]
        if spec.attention is None and spec.recurrence is None:
            return None
        y, states = x, self.weights.states
        if index == 0 and states is not None and self.spec.attends_to_states:
            y = states.attention_inputs(backend, x, self.weights.embedding, self.spec)
        elif spec.has_attention_norm and spec.norms in ("pre", "both"):
            y = self._mixer_input(backend, x, weights)
        convolution, kernels = weights.attention_convolution, None
        if convolution is not None:
            y, kernels = convolution.of_inputs(backend, y)
        y = self._mixer(backend, y, spec, weights, index)
        if convolution is not None:
            y = convolution.of_outputs(backend, y, kernels)
        if weights.attention_factors is not None:
            y = backend.multiply(y, weights.attention_factors)
        if spec.norms in ("post", "both"):
            y = self._post_norm(backend, y, weights.attention_post_norm)
        return self._scaled(backend, y)

    def _mixer_input(self, backend: Backend, x: Any, weights: LayerWeights) -> Any:
        """The normed input of a layer's first sublayer."""
        y = self._norm(backend, x, weights.attention_norm, weights.attention_norm_bias)
        gate = weights.attention_norm_gate
        return y if gate is None else gate.apply(backend, y)

    def _mlp_block(self, backend: Backend, x: Any, index: int, inputs: Any = None) -> Any:
        """The MLP sublayer of a layer without its residual connection, norms included; `inputs` are
        those of the layer."""
        spec, weights = self.spec.layers[index], self.weights.layers[index]
        y = x
        if spec.norms in ("pre", "both"):
            y = self._norm(backend, x, weights.mlp_norm, weights.mlp_norm_bias)
        if weights.mlp_norm_gate is not None:
            y = weights.mlp_norm_gate.apply(backend, y)
        assert weights.mlp is not None, "checked by `_add_blocks`"
        if weights.mlp_mix is not None:
            assert spec.recurrence is not None, "checked by `_check_time_mix`"
            first, shape = self.spec.hidden_size, spec.recurrence.shape
            mixes = [weights.mlp_mix]
            if weights.mlp_receptance_mix is not None:
                mixes.append(weights.mlp_receptance_mix)
            y, *receptance = backend.shift(y, index, shape, first, mixes)
        convolution, kernels = weights.mlp_convolution, None
        if convolution is not None:
            y, kernels = convolution.of_inputs(backend, y)
        if isinstance(weights.mlp, Experts) and weights.mlp.norms is not None:
            y = self._experts_beside_mlp(backend, x, y, spec, weights.mlp, weights.mlp.norms)
        elif weights.xielu is not None:
            assert isinstance(weights.mlp, PlainMlp), "checked by `ModelSpec`"
            y = _plain_mlp(backend, y, weights.mlp, weights.xielu)
        elif spec.has_mlp_inner_norm:
            assert isinstance(weights.mlp, GatedMlp), "checked by `ModelSpec`"
            y = _gated_product(backend, y, spec, weights.mlp)
            y = backend.rms_norm(y, weights.mlp_inner_norm, self.spec.norm_eps)
            y = weights.mlp.down.apply(backend, y)
        else:
            y = _mlp(backend, y, spec, weights.mlp, inputs)
        if convolution is not None:
            y = convolution.of_outputs(backend, y, kernels)
        if weights.mlp_receptance is not None:
            y = backend.gated(weights.mlp_receptance.apply(backend, receptance[0]), y, "sigmoid")
        if weights.mlp_factors is not None:
            y = backend.multiply(y, weights.mlp_factors)
        if spec.norms != "sum" and spec.norms_output:
            y = self._post_norm(backend, y, weights.mlp_post_norm)
        return self._scaled(backend, y)

    def _experts_beside_mlp(
        self, backend: Backend, x: Any, y: Any, spec: LayerSpec, mlp: Experts, norms: ExpertNorms
    ) -> Any:
        """The sum of the MLP's output for y and of the experts' output for x, each normed."""
        assert spec.routing is not None and mlp.shared is not None, "checked by `_check_mlp`"
        eps = self.spec.norm_eps
        router = mlp.router.apply(backend, backend.rms_norm(x, norms.router, eps))
        inputs = backend.rms_norm(x, norms.input, eps)
        routed = backend.experts(inputs, router, mlp.routed, spec.routing, spec.activation)
        shared = backend.rms_norm(_mlp(backend, y, spec, mlp.shared), norms.shared, eps)
        return backend.add(shared, backend.rms_norm(routed, norms.output, eps))

    def _norm(
        self,
        backend: Backend,
        x: Any,
        weight: np.ndarray | None,
        bias: np.ndarray | None = None,
        eps: float | None = None,
    ) -> Any:
        """A norm of hidden states, of the kind that the model has."""
        eps = self.spec.norm_eps if eps is None else eps
        if self.spec.norm == "rms":
            return backend.rms_norm(x, weight, eps)
        assert weight is not None
        return backend.layer_norm(x, weight, bias, eps)

    def _post_norm(self, backend: Backend, y: Any, weight: np.ndarray | None) -> Any:
        """The norm of the output of a sublayer."""
        return self._norm(backend, y, weight, eps=self.spec.post_norm_eps)

    def final_norm(self, backend: Backend, x: Any) -> Any:
        """Hidden states after the final norm and the matrix in front of the head's (if there are
        some), the input of the head's matrix. Streams with gates are read through the last ones;
        of streams with hyper-connections the sum is taken, or the mean."""
        weights = self.weights
        if weights.stream_gates is not None:
            return weights.stream_gates.read(backend, x, self.spec)[0]
        if weights.hyper is not None:
            x = weights.hyper.merge(backend, x, self.spec)
        elif self.spec.hyper is not None:
            x = mean_of_streams(backend, x, self.spec)
        elif self.has_wide_states:
            x = backend.columns(x, 0, self.spec.hidden_size)
        return self.normed_sum(backend, x)

    def normed_sum(self, backend: Backend, x: Any) -> Any:
        """`final_norm` of hidden states `[n, hidden_size]`, which are no several streams."""
        weights = self.weights
        if self.spec.has_final_norm:
            eps = self.spec.final_norm_eps
            x = self._norm(backend, x, weights.final_norm, weights.final_norm_bias, eps)
        if weights.head_dense is None:
            return x
        assert self.spec.head_activation is not None, "checked when the network is made"
        x = backend.activate(weights.head_dense.apply(backend, x), self.spec.head_activation)
        return self._norm(backend, x, weights.head_norm)

    def _scaled(self, backend: Backend, y: Any) -> Any:
        """The output of a sublayer times the model's residual scale."""
        scale = self.spec.residual_scale
        return y if scale == 1.0 else backend.scale(y, scale)

    def head(self, backend: Backend, x: Any) -> Any:
        """Logits from hidden states, of the last layer or of an earlier one at which rows stop."""
        y = self.final_norm(backend, x)
        return self.scaled_logits(
            backend, backend.linear(y, self.weights.head, self.weights.head_bias)
        )

    def scaled_logits(self, backend: Backend, y: Any) -> Any:
        """Logits from the products of the head's matrix."""
        if self.spec.logit_scale != 1.0:
            y = backend.scale(y, self.spec.logit_scale)
        if self.spec.logit_softcap is not None:
            y = backend.softcap(y, self.spec.logit_softcap)
        return y

    def _mixer(
        self, backend: Backend, x: Any, spec: LayerSpec, weights: LayerWeights, index: int
    ) -> Any:
        """The output of attention, of the recurrent sublayer, or the sum of both."""
        if spec.recurrence is None:
            return self._attention(backend, x, spec, weights, index)
        assert weights.recurrent is not None, "checked by `_check_layer`"
        if isinstance(weights.recurrent, TimeMix | Mlstm):
            return weights.recurrent.apply(backend, x, index, spec.recurrence.shape)
        y = self._recurrent(backend, x, spec.recurrence, weights.recurrent, index)
        if spec.attention is None:
            return y
        return backend.add(y, self._attention(backend, x, spec, weights, index))

    def _recurrent(
        self, backend: Backend, x: Any, spec: RecurrentSpec, weights: RecurrentWeights, index: int
    ) -> Any:
        y = self._ungated(backend, x, spec, weights, index)
        return self._gated(backend, x, y, spec, weights)

    @staticmethod
    def _ungated(
        backend: Backend, x: Any, spec: RecurrentSpec, weights: RecurrentWeights, index: int
    ) -> Any:
        """The output of a recurrence before its gate and norm."""
        inputs = weights.inputs.apply(backend, x)
        if weights.input_gate is not None:
            inputs = backend.gated(weights.input_gate.apply(backend, x), inputs, "identity")
        if spec.shape.rule != "selective":
            for linear in (weights.keys, weights.queries):
                if linear is not None:
                    inputs = backend.join(inputs, linear.apply(backend, x))
        return _recurrence(backend, x, inputs, spec, weights, index)

    def _gated(
        self, backend: Backend, x: Any, y: Any, spec: RecurrentSpec, weights: RecurrentWeights
    ) -> Any:
        """The output of a recurrent sublayer from that of the recurrence, y."""
        eps = self.spec.norm_eps if spec.norm_eps is None else spec.norm_eps
        if spec.norm == "before":
            y = backend.rms_norm(y, weights.norm, eps, spec.norm_groups)
        down = x if weights.gate_down is None else weights.gate_down.apply(backend, x)
        y = backend.gated(weights.gate.apply(backend, down), y, spec.gate)
        if spec.norm == "after":
            y = backend.rms_norm(y, weights.norm, eps, spec.norm_groups)
        return weights.output.apply(backend, y)

    def _attention(
        self, backend: Backend, x: Any, spec: LayerSpec, weights: LayerWeights, index: int
    ) -> Any:
        shape = spec.attention
        assert shape is not None
        if spec.latent is not None:
            return self._latent_attention(backend, x, spec, weights, index)
        if spec.shared_key is not None:
            return self._shared_key_attention(backend, x, spec, weights, index)
        if weights.convolved is not None:
            return self._convolved_attention(backend, x, spec, weights, index)
        inputs = _query_inputs(backend, x, spec, weights)
        q = self._queries(backend, inputs, spec, weights)
        if weights.differential is not None:
            q = weights.differential.queries(backend, q, shape)
        biases: Biases | None = weights.distance_biases
        biases = biases if weights.relative_positions is None else weights.relative_positions
        if spec.cache_layer is not None:
            y = backend.attend(q, spec.cache_layer, shape, weights.sinks, biases)
        else:
            keys = self._keys_values(backend, x, spec, weights, shape)
            y = self._attend(backend, x, inputs, q, keys, spec, weights, index, biases)
        if weights.differential is not None:
            y = weights.differential.combine(backend, y, shape)
        if spec.has_head_norm:
            y = backend.rms_norm(y, None, self.spec.norm_eps, shape.num_heads)
        if weights.attention_gate is not None:
            assert spec.attention_gate is not None, "checked by `_check_attention`"
            gate = weights.attention_gate.apply(backend, x)
            if spec.gates_heads:
                y = backend.gate_parts(y, gate, spec.attention_gate)
            else:
                y = backend.gated(gate, y, spec.attention_gate)
        if spec.has_attention_inner_norm:
            y = backend.rms_norm(y, weights.attention_inner_norm, self.spec.norm_eps)
        if weights.attention_experts is not None:
            return weights.attention_experts.output(backend, x, y, spec)
        assert weights.output is not None, "checked by `_check_attention`"
        return weights.output.apply(backend, y)

    def _keys_values(
        self, backend: Backend, x: Any, spec: LayerSpec, weights: LayerWeights, shape: Attention
    ) -> tuple[Any, Any]:
        """The keys and values of a layer for the normed inputs x."""
        assert weights.key is not None, "checked by `_check_attention`"
        k, heads = _limited(backend, weights.key.apply(backend, x), spec), shape.num_kv_heads
        v = k
        if weights.value is not None:
            v = _limited(backend, weights.value.apply(backend, x), spec)
        norm, key_heads = (weights.key_norm, weights.key_norm_bias), heads
        if spec.is_differential:
            key_heads *= 2
        k = self._positioned(backend, k, spec, key_heads, norm, spec.rope)
        if spec.has_value_norm:
            v = backend.rms_norm(v, None, self.spec.norm_eps, heads)
        if weights.key_bias is not None:
            k = weights.key_bias.keys(backend, k, v, shape)
        return k, v

    def _latent_attention(
        self, backend: Backend, x: Any, spec: LayerSpec, weights: LayerWeights, index: int
    ) -> Any:
        shape, latent = spec.attention, weights.latent
        assert shape is not None and latent is not None and spec.latent is not None
        assert weights.output is not None
        inputs = _query_inputs(backend, x, spec, weights)
        q = self._queries(backend, inputs, spec, weights)
        keys = None
        if spec.cache_layer is None:
            keys = _latent_keys(backend, x, spec, weights, spec.latent), None
        y = self._attend(backend, x, inputs, q, keys, spec, weights, index)
        y = backend.grouped_linear(y, latent.values)
        if weights.attention_gate is not None:
            assert spec.attention_gate is not None, "checked by `_check_attention`"
            reads_query = spec.low_rank_query is not None and spec.low_rank_query.has_raw
            gate = weights.attention_gate.apply(backend, inputs if reads_query else x)
            if spec.gates_heads:
                y = backend.gate_parts(y, gate, spec.attention_gate)
            else:
                y = backend.gated(gate, y, spec.attention_gate)
        return weights.output.apply(backend, y)

    def _convolved_attention(
        self, backend: Backend, x: Any, spec: LayerSpec, weights: LayerWeights, index: int
    ) -> Any:
        shape, own, stored = spec.attention, weights.convolved, spec.stored_inputs
        assert shape is not None and own is not None and stored is not None
        assert weights.query and weights.key and weights.value and weights.output
        q, k = weights.query.apply(backend, x), weights.key.apply(backend, x)
        q, k = own.queries_keys(backend, q, k, index, shape, stored)
        v = own.values(backend, weights.value.apply(backend, x), x, index, stored)
        if spec.rope is not None:
            q = backend.rope(q, shape.num_heads, spec.rope)
            k = backend.rope(k, shape.num_kv_heads, spec.rope)
        return weights.output.apply(backend, backend.attention(q, k, v, index, shape))

    def _shared_key_attention(
        self, backend: Backend, x: Any, spec: LayerSpec, weights: LayerWeights, index: int
    ) -> Any:
        shape, own, parts = spec.attention, spec.shared_key, weights.shared_key
        assert shape is not None and own is not None and parts is not None
        assert weights.output is not None
        inputs = _query_inputs(backend, x, spec, weights)
        q = self._queries(backend, inputs, spec, weights)
        k, _ = self._keys_values(backend, x, spec, weights, shape)
        if parts.entry is not None:
            stored = spec.stored_inputs
            assert stored is not None and own.entry_rope is not None
            entry = parts.entry.apply(backend, x, index, stored, 0)
            entry = backend.rms_norm(entry, parts.entry_norm, self.spec.norm_eps)
            k = backend.join(k, backend.rope(entry, 1, own.entry_rope))
        y = self._attend(backend, x, inputs, q, (k, None), spec, weights, index)
        y = backend.rope(y, shape.num_heads, own.output_rope)
        return weights.output.apply(backend, backend.grouped_linear(y, parts.parts))

    def _attend(
        self,
        backend: Backend,
        x: Any,
        inputs: Any,
        q: Any,
        keys_values: tuple[Any, Any | None] | None,
        spec: LayerSpec,
        weights: LayerWeights,
        index: int,
        biases: Biases | None = None,
    ) -> Any:
        """Store the keys and values, if there are some, and attend to those of all positions, or of
        those that an indexer selects; `inputs` are those of the query matrix."""
        shape, indexer = spec.attention, weights.indexer
        assert shape is not None
        source = index if spec.cache_layer is None else spec.cache_layer
        if not shape.is_selected:
            if keys_values is None:
                return backend.attend(q, source, shape, weights.sinks, biases)
            return backend.attention(q, *keys_values, index, shape, weights.sinks, biases)
        self._store(backend, x, keys_values, spec, weights, index)
        if spec.indexer is None or indexer is None:
            backend.select(None, None, 1, index, shape)
        else:
            heads = spec.indexer.num_heads
            if spec.low_rank_query is not None and spec.low_rank_query.has_raw:
                inputs = backend.columns(inputs, 0, spec.low_rank_query.rank)
            if indexer.input_norm is not None:
                norm, bias = indexer.input_norm, indexer.input_norm_bias
                inputs = backend.layer_norm(x, norm, bias, spec.indexer.norm_eps)
            query = indexer.query.apply(backend, inputs)
            if indexer.query_scale is not None:
                query = indexer.query_scale.apply(backend, query, spec.indexer.head_dim)
            if indexer.query_norm is not None:
                query = backend.rms_norm(query, indexer.query_norm, spec.indexer.norm_eps, heads)
            query = query if spec.rope is None else backend.rope(query, heads, spec.rope)
            factors = None if indexer.weights is None else indexer.weights.apply(backend, x)
            if spec.indexer.key_rope is not None:
                factors = np.ones(heads, np.float32)
            backend.select(query, factors, heads, index, shape)
        return backend.attend(q, source, shape, weights.sinks, biases)

    @staticmethod
    def _store(
        backend: Backend,
        x: Any,
        keys_values: tuple[Any, Any | None] | None,
        spec: LayerSpec,
        weights: LayerWeights,
        index: int,
    ) -> None:
        """Store the keys and values of a layer, if it has some, and the keys that its indexer makes
        of x."""
        assert spec.attention is not None
        key, indexer = None, weights.indexer
        if spec.indexer is not None and indexer is not None:
            rope, eps = spec.rope, spec.indexer.norm_eps
            if spec.indexer.key_rope is not None and isinstance(indexer.key, Linear):
                stored, rope = spec.stored_inputs, spec.indexer.key_rope
                assert stored is not None, "checked by `LayerSpec`"
                key = backend.pool(indexer.key.apply(backend, x), index, stored, 0, None)
            elif isinstance(indexer.key, Linear):
                key = indexer.key.apply(backend, x)
            elif spec.attention.has_block_keys:
                key = _block_key(backend, x, spec, indexer, indexer.key, index)
            else:  # of an entry, which is stored behind the layer's own
                stored, own = spec.stored_inputs, spec.shared_key
                assert stored is not None and own is not None
                first = stored.width - 2 * (1 + own.has_overlap) * spec.indexer.head_dim
                key, rope = indexer.key.apply(backend, x, index, stored, first), own.entry_rope
            if isinstance(indexer.key, Linear) or not spec.attention.has_block_keys:
                key = _normed_key(backend, key, indexer, eps)
            key = key if rope is None else backend.rope(key, 1, rope)
        k, v = keys_values or (None, None)
        if k is not None or key is not None:
            backend.store(k, v, index, spec.attention, key)

    def _positioned(
        self,
        backend: Backend,
        x: Any,
        spec: LayerSpec,
        heads: int,
        norm: tuple[np.ndarray | None, np.ndarray | None],
        rope: Rope | None,
    ) -> Any:
        """Queries or keys, normed with a weight and a bias, and with rotary embedding."""
        weight, bias = norm
        if rope is not None and spec.norm_after_rope:
            x = backend.rope(x, heads, rope)
        if spec.qk_norm is not None:
            groups = 1 if spec.qk_norm == "full" else heads
            if self.spec.norm == "layer":
                assert weight is not None, "checked by `ModelSpec`"
                x = backend.layer_norm(x, weight, bias, self.spec.norm_eps, groups)
            else:
                x = backend.rms_norm(x, weight, self.spec.norm_eps, groups)
        if rope is not None and not spec.norm_after_rope:
            x = backend.rope(x, heads, rope)
        return x


def _normed_key(backend: Backend, key: Any, weights: IndexerWeights, eps: float) -> Any:
    """Keys of an indexer, normed."""
    if weights.norm_bias is None:
        return backend.rms_norm(key, weights.norm, eps)
    return backend.layer_norm(key, weights.norm, weights.norm_bias, eps)


def _latent_keys(
    backend: Backend, x: Any, spec: LayerSpec, weights: LayerWeights, latent: LatentSpec
) -> Any:
    """The latents of the normed inputs x, and the part of the key behind them, if there is one."""
    shape = spec.attention
    assert shape is not None and shape.latent_dim is not None
    assert weights.key is not None and weights.latent is not None, "checked by `_check_attention`"
    k, rotary = weights.key.apply(backend, x), None
    if shape.head_dim > shape.latent_dim:
        k, rotary = backend.split(k, shape.latent_dim)
    k = backend.rms_norm(k, weights.latent.norm, latent.norm_eps)
    if rotary is None:
        return k
    if weights.latent.rotary_norm is not None:
        rotary = backend.rms_norm(rotary, weights.latent.rotary_norm, latent.norm_eps)
    rotary = rotary if spec.rope is None else backend.rope(rotary, 1, spec.rope)
    return backend.join(k, rotary)


def _block_key(
    backend: Backend,
    x: Any,
    spec: LayerSpec,
    weights: IndexerWeights,
    entry: EntryWeights,
    layer: int,
) -> Any:
    """The indexer's key of the block that ends with each row, from the normed keys of its rows."""
    stored = spec.stored_inputs
    assert stored is not None and spec.indexer is not None, "checked by `LayerSpec`"
    keys = _normed_key(backend, entry.values.apply(backend, x), weights, spec.indexer.norm_eps)
    inputs = backend.join(keys, entry.gates.apply(backend, x))
    return backend.pool(inputs, layer, stored, 0, entry.bias)


def _query_inputs(backend: Backend, x: Any, spec: LayerSpec, weights: LayerWeights) -> Any:
    """What the query matrix reads of the normed inputs x."""
    if spec.low_rank_query is None:
        return x
    assert weights.query_down is not None, "checked by `_check_query`"
    x = weights.query_down.apply(backend, x)
    normed = backend.rms_norm(x, weights.query_down_norm, spec.low_rank_query.norm_eps)
    return backend.join(normed, x) if spec.low_rank_query.has_raw else normed


def _kept(backend: Backend, x: Any, factors: np.ndarray | None) -> Any:
    """The input of a sublayer in its sum, times factors if there are some."""
    return x if factors is None else backend.multiply(x, factors)


def _shifted(backend: Backend, x: Any, bias: Weight | None) -> Any:
    """x plus a bias, if there is one."""
    return x if bias is None else backend.add_positions(x, bias)


def _limited(backend: Backend, x: Any, spec: LayerSpec) -> Any:
    """Queries, keys or values, clamped if the layer says so."""
    return x if spec.qkv_limit is None else backend.clamp(x, spec.qkv_limit)


def mlp_matrices(mlp: Mlp) -> Iterator[Weight]:
    """Yield every matrix of an MLP."""
    if not isinstance(mlp, Experts):
        yield from (weight for linear in vars(mlp).values() for weight in linear.matrices)
        return
    yield mlp.router.weight
    yield from mlp.routed.matrices
    if mlp.adjugate is not None:
        yield from mlp.adjugate.matrices
    for latent in (mlp.latent_down, mlp.latent_up):
        if latent is not None:
            yield latent.weight
    if mlp.shared is not None:
        yield from mlp_matrices(mlp.shared)
    if mlp.shared_gate is not None:
        yield mlp.shared_gate


def _recurrence(
    backend: Backend,
    x: Any,
    inputs: Any,
    spec: RecurrentSpec,
    weights: RecurrentWeights,
    index: int,
) -> Any:
    """The output of the convolution and the recurrence of layer `index`."""
    shape, vectors = spec.shape, weights.vectors
    if shape.rule == "conv":
        return backend.convolution(inputs, index, shape, vectors)
    if shape.rule == "lru":
        channels = backend.convolution(inputs, index, shape, vectors)
        gates = tuple(
            backend.grouped_linear(channels, blocks)
            for blocks in (weights.input_blocks, weights.recurrence_blocks)
        )
        return backend.recurrence(None, gates, index, shape, vectors)
    if shape.rule == "retention":
        return backend.recurrence(inputs, (), index, shape, vectors)
    assert weights.gates is not None, "checked by `_check_recurrent`"
    if shape.rule == "kda":
        assert weights.strengths is not None, "checked by `_check_recurrent`"
        down = x if weights.step_down is None else weights.step_down.apply(backend, x)
        steps = weights.gates.apply(backend, down)
        strengths = weights.strengths.apply(backend, x)
        return backend.recurrence(inputs, (strengths, steps), index, shape, vectors)
    if shape.rule != "selective":
        gates = weights.gates.apply(backend, x)
        return backend.recurrence(inputs, (gates,), index, shape, vectors)
    assert weights.keys is not None and weights.queries is not None
    assert weights.step_down is not None
    channels = backend.convolution(inputs, index, shape, vectors)
    parts = [
        linear.apply(backend, channels)
        for linear in (weights.keys, weights.queries, weights.step_down)
    ]
    if spec.gate_norm_eps is not None:
        norms: list[np.ndarray | None] = [*weights.gate_norms] or [None] * len(parts)
        parts = [
            backend.rms_norm(part, norm, spec.gate_norm_eps)
            for part, norm in zip(parts, norms, strict=True)
        ]
    keys, queries, down = parts
    steps = weights.gates.apply(backend, down)
    return backend.recurrence(None, (keys, queries, steps), index, shape, vectors)


def _mlp(backend: Backend, x: Any, spec: LayerSpec, mlp: Mlp, inputs: Any | None = None) -> Any:
    """The output of an MLP for x. `inputs` are those of the layer, which the router of experts or
    the experts may read."""
    if isinstance(mlp, PlainMlp):
        assert isinstance(spec.activation, str), "checked by `ModelSpec`"
        return _plain_mlp(backend, x, mlp, spec.activation)
    if isinstance(mlp, Experts):
        assert spec.routing is not None, "checked by `_check_mlp`"
        read = x
        if mlp.input_norm is not None:
            read = backend.rms_norm(inputs, mlp.input_norm.weight, mlp.input_norm.eps)
        router = mlp.router.apply(backend, inputs if spec.routes_inputs else read)
        if spec.routing.scoring == "given":
            router = backend.activate(router, "relu")
        if mlp.router_softcap is not None:
            router = backend.softcap(router, mlp.router_softcap)
        if mlp.router_norm is not None:
            router = backend.rms_norm(router, mlp.router_norm.weight, mlp.router_norm.eps)
        latent = read if mlp.latent_down is None else mlp.latent_down.apply(backend, read)
        if mlp.latent_norm is not None:
            latent = backend.rms_norm(latent, mlp.latent_norm.weight, mlp.latent_norm.eps)
        y = backend.experts(latent, router, mlp.routed, spec.routing, spec.activation)
        if mlp.adjugate is not None:
            assert spec.adjugate is not None, "checked by `_check_mlp`"
            further = backend.experts(latent, router, mlp.adjugate, spec.adjugate, spec.activation)
            y = backend.add(y, further)
        if mlp.latent_output_norm is not None:
            norm = mlp.latent_output_norm
            y = backend.rms_norm(y, norm.weight, norm.eps)
        y = y if mlp.latent_up is None else mlp.latent_up.apply(backend, y)
        y = y if mlp.bias is None else backend.add_positions(y, mlp.bias)
        if mlp.shared is None:
            return y
        shared = _mlp(backend, x, spec.of_shared_mlp, mlp.shared)
        if mlp.shared_gate is not None:
            shared = backend.gate_parts(shared, backend.linear(x, mlp.shared_gate), "sigmoid")
        return backend.add(y, shared)
    return mlp.down.apply(backend, _gated_product(backend, x, spec, mlp))


def _gated_product(backend: Backend, x: Any, spec: LayerSpec, mlp: GatedMlp) -> Any:
    """The input of the last matrix of a gated MLP."""
    gate, up = mlp.gate.apply(backend, x), mlp.up.apply(backend, x)
    if spec.gate_cutoff is not None:
        gate = backend.cut_off(gate, spec.gate_cutoff)
    return backend.gated(gate, up, spec.activation)


def _plain_mlp(backend: Backend, x: Any, mlp: PlainMlp, activation: str | Xielu) -> Any:
    return mlp.down.apply(backend, backend.activate(mlp.up.apply(backend, x), activation))


def _check_head_tokens(spec: ModelSpec, tokens: np.ndarray | None) -> None:
    if (tokens is not None) != (spec.head_size > 0):
        raise CheckpointError(
            "only one of the spec and the weights has the tokens of a smaller head"
        )
    if tokens is None:
        return
    is_valid = tokens.shape == (spec.head_size,) and tokens.dtype == np.int64
    if not is_valid or tokens.min() < 0 or tokens.max() >= spec.vocab_size:
        raise CheckpointError(
            f"the head's tokens are not {spec.head_size} ids below {spec.vocab_size}"
        )
    if len(np.unique(tokens)) < len(tokens):
        raise CheckpointError("the head's tokens have an id twice")


def _check_states(spec: ModelSpec, weights: StateWeights | None) -> None:
    states, hidden = spec.states, spec.hidden_size
    if (weights is None) != (states is None):
        raise CheckpointError("only one of the spec and the weights has states")
    if weights is None or states is None:
        return
    width = states.num_taps * states.target_size
    for name, linear, shape in (
        ("projection", weights.projection, (hidden, 2 * hidden)),
        ("projection of the target's states", weights.target, (hidden, width)),
    ):
        is_expected = states.joins == "projection" if name == "projection" else states.is_projected
        if (linear is not None) != is_expected:
            raise CheckpointError(f"only one of the spec and the weights has the {name}")
        if linear is not None:
            _check_linear(f"the {name}", linear, shape)
    if bool(weights.cells) != (states.joins == "cells"):
        raise CheckpointError("only one of the spec and the weights has cells")
    for index, cell in enumerate(weights.cells):
        shape = (3 * hidden, hidden if index else 2 * hidden)
        _check_linear(f"cell {index}", cell, shape)
    for name, norm, is_expected in (
        ("embedding", weights.embedding_norm, states.has_norms or states.has_embedding_norm),
        ("state", weights.state_norm, states.has_norms or states.joins in ("context", "cross")),
    ):
        size = width if spec.num_streams > 1 and name == "state" else hidden
        if (norm is not None) != is_expected:
            raise CheckpointError(f"only one of the spec and the weights has the {name}'s norm")
        if norm is not None:
            _check_vector(f"the {name}'s norm", norm, size)
    if len(weights.target_norms) != states.num_target_norms:
        raise CheckpointError("the spec and the weights differ in norms of the target's states")
    if (weights.mask is not None) != states.has_mask:
        raise CheckpointError("only one of the spec and the weights has the state of mask tokens")
    if weights.mask is not None:
        for row in weights.mask:
            _check_vector("the state of a mask token", row, width)
    size = width if len(weights.target_norms) == 1 else states.target_size
    for norm in weights.target_norms:
        _check_vector("a norm of the target's states", norm, size)


def _check_layer(
    prefix: str, spec: LayerSpec, layer: LayerWeights, hidden: int, width: int
) -> None:
    """`width`: numbers of the inputs of queries, keys and values."""
    has_mixer = spec.has_mixer
    if (layer.memory_unit is not None) != (spec.memory == "reads"):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has a memory unit")
    if (layer.side is not None) != (spec.memory in ("side", "embeddings")):
        raise CheckpointError(f"{prefix}only one of the spec and the weights is a side layer")
    if layer.side is not None:
        _check_vector(f"{prefix}the side layer's norm", layer.side.norm, hidden)
        projection = layer.side.projection
        _check_linear(f"{prefix}the side layer's projection", projection, (hidden, hidden))
    if spec.attention is not None:
        _check_attention(prefix, spec, spec.attention, layer, hidden, width)
    if (spec.recurrence is None or spec.has_ngrams) != (layer.recurrent is None):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has a recurrence")
    if spec.recurrence is not None and isinstance(layer.recurrent, RecurrentWeights):
        _check_recurrent(prefix, spec.recurrence, layer.recurrent, hidden)
    has_memory = spec.recurrence is not None and spec.recurrence.shape.rule == "mlstm"
    if has_memory != isinstance(layer.recurrent, Mlstm):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has an mLSTM")
    if spec.recurrence is not None and isinstance(layer.recurrent, Mlstm):
        _check_mlstm(prefix, spec.recurrence.shape, layer.recurrent, hidden)
    has_pre_norm = spec.norms in ("pre", "both", "stream")
    has_post_norm = spec.norms not in ("pre", "stream", "none")
    has_mlp = spec.mlp != "none"
    first = width if spec.memory == "embeddings" else hidden
    sizes = {
        "attention_norm": (
            first if has_pre_norm and has_mixer and spec.has_attention_norm else None
        ),
        "mlp_norm": hidden if has_pre_norm and has_mlp else None,
        "attention_post_norm": hidden if has_post_norm and has_mixer else None,
        "mlp_post_norm": hidden if spec.norms_output and has_mlp else None,
        "second_norm": hidden if spec.has_second_sum else None,
        "attention_residual": hidden if spec.has_residual_gates and has_mixer else None,
        "mlp_residual": hidden if spec.has_residual_gates and has_mlp else None,
    }
    for name, size in sizes.items():
        if size is not None:
            _check_vector(prefix + name, getattr(layer, name), size)
    for name in ("attention_norm_gate", "mlp_norm_gate"):
        rank, gate = getattr(spec, name), getattr(layer, name)
        if (gate is not None) != (rank > 0):
            raise CheckpointError(f"{prefix}only one of the spec and the weights has {name}")
        if gate is not None:
            _check_linear(f"{prefix}{name}", gate.down, (rank, hidden))
            _check_linear(f"{prefix}{name}", gate.up, (hidden, rank))
    for name in (
        "attention_norm_bias",
        "mlp_norm_bias",
        "attention_post_norm_bias",
        "mlp_post_norm_bias",
        "second_norm_bias",
    ):
        _check_bias(prefix + name, getattr(layer, name), hidden)
    if (layer.mlp is not None) != has_mlp:
        raise CheckpointError(f"{prefix}only one of the spec and the weights has an MLP")
    if layer.mlp is not None:
        _check_mlp(prefix, spec, layer.mlp, hidden)
        if spec.has_mlp_inner_norm:
            assert isinstance(layer.mlp, GatedMlp), "checked by `ModelSpec`"
            inner = layer.mlp.down.weight.in_features
            _check_vector(f"{prefix}mlp_inner_norm", layer.mlp_inner_norm, inner)
    if (layer.xielu is not None) != (spec.activation == "xielu" and has_mlp):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has an xIELU")
    for name, value in ({} if layer.xielu is None else layer.xielu._asdict()).items():
        number(f"{prefix}{name} of the xIELU", value, -MAX_FACTOR)
    if (layer.scale is not None) != spec.has_scale:
        raise CheckpointError(f"{prefix}only one of the spec and the weights has a scale")
    for scale in (layer.scale, layer.canvas_scale):
        if scale is not None:
            number(f"{prefix}scale", scale, -MAX_FACTOR)


def _check_per_layer(spec: ModelSpec, weights: PerLayerEmbeddings | None) -> None:
    size, width = spec.per_layer_size, spec.per_layer_size * spec.num_layers
    if (weights is not None) != (size > 0):
        raise CheckpointError("only one of the spec and the weights has embeddings per layer")
    if weights is not None:
        if weights.table is not None:
            rows = weights.table.out_features
            _check_matrix("the embeddings per layer", weights.table, (rows, width))
        shape = (width, spec.hidden_size)
        _check_linear("the projection of embeddings per layer", weights.projection, shape)
        _check_vector("the norm of embeddings per layer", weights.norm, size)


def _check_streams(spec: ModelSpec, weights: StreamProjections | None) -> None:
    if (weights is not None) != spec.predicts_streams:
        raise CheckpointError("only one of the spec and the weights has streams")
    if weights is None:
        return
    for name, linears in vars(weights).items():
        if len(linears) != spec.num_streams - 1:
            raise CheckpointError(
                f"the weights have {len(linears)} {name} projections of streams;"
                f" allowed are {spec.num_streams - 1}"
            )
        for linear in linears:
            shape = (spec.hidden_size, spec.hidden_size)
            _check_linear(f"a {name} projection of streams", linear, shape)


def _check_hyper(prefix: str, spec: ModelSpec, weights: HyperWeights | None, rows: int) -> None:
    if weights is not None:
        shape = rows, spec.num_streams * spec.hidden_size
        _check_linear(f"{prefix}hyper-connections", weights.projection, shape)


def _check_residuals(spec: ModelSpec, weights: ModelWeights) -> None:
    """Check the scores of sums of blocks of layers."""
    has_blocks, layers = spec.residual_block > 0, [layer.residuals for layer in weights.layers]
    if any((part is not None) != has_blocks for part in (weights.residual_score, *layers)):
        raise CheckpointError("only one of the spec and the weights has sums of blocks of layers")
    scores = [] if weights.residual_score is None else [weights.residual_score]
    for index, residuals in enumerate(layers):
        if residuals is None:
            continue
        if (residuals.mixer is None) != (index == 0):
            raise CheckpointError(f"layer {index}: all layers but the first have two scores")
        scores += residuals.matrices
    for score in scores:
        _check_matrix("the score of a block of layers", score, (1, spec.hidden_size))


def _check_stream_gates(spec: ModelSpec, weights: ModelWeights) -> None:
    """Check the gates of streams, and embeddings of n-grams."""
    has_gates = spec.stream_gate_rank > 0
    if (weights.stream_gates is not None) != has_gates:
        raise CheckpointError("only one of the spec and the weights has gates of streams")
    found = [("the last ", weights.stream_gates)]
    for index, (shape, layer) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        prefix, gates = f"layer {index}, ", layer.stream_gates
        if (layer.ngrams is not None) != shape.has_ngrams:
            raise CheckpointError(f"{prefix}only one of the spec and the weights has n-grams")
        if (gates is not None) != (has_gates and not shape.has_ngrams):
            raise CheckpointError(f"{prefix}only one of the spec and the weights has gates")
        if gates is not None:
            found += [(prefix, gates.mixer), (prefix, gates.mlp)]
        if layer.ngrams is not None:
            _check_ngrams(prefix, spec, shape, layer.ngrams)
    count, rank = spec.num_streams, spec.stream_gate_rank
    width = count * spec.hidden_size
    for prefix, one in found:
        if one is not None:
            _check_vector(f"{prefix}norm of streams", one.norm, width)
            _check_linear(f"{prefix}gates of streams", one.down, (rank, width))
            _check_linear(f"{prefix}gates of streams", one.up, (width, rank))
            if one.factors is not None:
                _check_linear(f"{prefix}factors of streams", one.factors, (count, width))


def _check_ngrams(prefix: str, spec: ModelSpec, layer: LayerSpec, weights: NgramWeights) -> None:
    hashes, hidden, table = weights.hashes, spec.hidden_size, weights.table
    width, inner = spec.num_streams * hidden, len(hashes.sizes) * table.in_features
    _check_matrix(f"{prefix}the table", table, (table.out_features, table.in_features))
    if int((hashes.sizes + hashes.offsets).max()) > table.out_features or hashes.sizes.min() < 1:
        raise CheckpointError(
            f"{prefix}the hashes of n-grams exceed the {table.out_features} rows of their table"
        )
    _check_linear(f"{prefix}the keys of n-grams", weights.key, (width, inner))
    _check_linear(f"{prefix}the values of n-grams", weights.value, (hidden, inner))
    for norm in (weights.key_norm, weights.query_norm, weights.conv_norm):
        _check_vector(f"{prefix}a norm of n-grams", norm, width)
    assert layer.recurrence is not None, "checked by `ModelSpec`"
    size = layer.recurrence.shape.width * layer.recurrence.shape.window
    _check_vector(f"{prefix}the convolution of n-grams", weights.vectors.conv.ravel(), size)


def _check_stream_block(prefix: str, spec: ModelSpec, weights: StreamBlock | None) -> None:
    count, hidden = spec.num_streams, spec.hidden_size
    if (weights is not None) != spec.predicts_streams:
        raise CheckpointError(f"{prefix}only one of the spec and the weights has streams")
    if weights is None:
        return
    rank = weights.residual_down.weight.out_features
    for name, shape in (
        ("router", (count, hidden)),
        ("prediction", (count * count, count)),
        ("correction", (count, count)),
        ("residual_down", (rank, hidden)),
        ("residual_up", (hidden, rank)),
    ):
        _check_linear(prefix + name, getattr(weights, name), shape)
    for name in ("router_norm", "residual_norm"):
        _check_vector(prefix + name, getattr(weights, name), hidden)
    _check_bias(f"{prefix}output_scale", weights.output_scale, hidden)


def _check_memory_unit(prefix: str, spec: ModelSpec, unit: MemoryUnit) -> None:
    hidden, size = spec.hidden_size, spec.memory_size
    _check_linear(f"{prefix}the memory unit's gate", unit.gate, (size, hidden))
    _check_linear(f"{prefix}the memory unit's output", unit.output, (hidden, size))


def _check_per_layer_block(prefix: str, spec: ModelSpec, weights: PerLayerBlock | None) -> None:
    size, hidden = spec.per_layer_size, spec.hidden_size
    if (weights is not None) != (size > 0):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has embeddings")
    if weights is not None:
        _check_linear(f"{prefix}the embeddings' gate", weights.gate, (size, hidden))
        _check_linear(f"{prefix}the embeddings' projection", weights.projection, (hidden, size))
        _check_vector(f"{prefix}the embeddings' norm", weights.norm, hidden)


def _check_attention(
    prefix: str, spec: LayerSpec, shape: Attention, layer: LayerWeights, hidden: int, width: int
) -> None:
    dim, is_full_norm = shape.head_dim - spec.has_key_bias, spec.qk_norm in ("full", "heads")
    q_size, kv_size = shape.num_heads * dim, shape.num_kv_heads * dim
    if (layer.differential is not None) != spec.is_differential:
        raise CheckpointError(f"{prefix}only one of the spec and the weights is differential")
    if layer.differential is not None:
        q_size //= 2
        _check_vector(f"{prefix}the differential norm", layer.differential.norm, dim)
        number(f"{prefix}the differential factor", layer.differential.factor, -MAX_FACTOR)
    _check_query(prefix, spec.low_rank_query, layer, width)
    query_width = width if spec.low_rank_query is None else spec.low_rank_query.width
    value_size = shape.num_heads * shape.value_dim // (2 if spec.is_differential else 1)
    sizes = {
        "query": (q_size, query_width),
        "key": (kv_size, width),
        "value": (shape.num_kv_heads * shape.value_dim, width),
        "output": (hidden, value_size),
    }
    if spec.latent is not None:
        sizes["query"] = shape.num_heads * spec.query_dim, query_width
        sizes["output"] = hidden, shape.num_heads * spec.latent.value_dim
        del sizes["value"]
        _check_latent(prefix, spec.latent, shape, layer.latent, spec.cache_layer is None)
    if (spec.shared_key is None) != (layer.shared_key is None):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has a shared key")
    if spec.shared_key is not None and layer.shared_key is not None:
        own = spec.shared_key
        sizes["output"] = hidden, own.output_groups * own.output_rank
        _check_shared_key(prefix, spec, shape, layer.shared_key, width)
        _check_vector(f"{prefix}the key's norm", layer.key_norm, dim)
    if (spec.query_routing is None) != (layer.attention_experts is None):
        raise CheckpointError(
            f"{prefix}only one of the spec and the weights has experts of queries"
        )
    if (layer.convolved is not None) != spec.is_convolved:
        raise CheckpointError(f"{prefix}only one of the spec and the weights convolves queries")
    if layer.convolved is not None:
        sizes["value"] = shape.num_kv_heads * dim // 2, width
        _check_convolved(prefix, shape, layer.convolved, width)
    if (layer.key_bias is not None) != spec.has_key_bias:
        raise CheckpointError(f"{prefix}only one of the spec and the weights has biases of keys")
    if layer.key_bias is not None:
        steps = shape.num_kv_heads, shape.num_kv_heads * shape.value_dim
        _check_linear(f"{prefix}the steps of biases", layer.key_bias.steps, steps)
        _check_vector(f"{prefix}the rates of biases", layer.key_bias.rates, shape.num_kv_heads)
        _check_matrix(f"{prefix}factors of biases", layer.key_bias.ones, (1, shape.num_heads))
    if layer.attention_experts is not None:
        del sizes["query"], sizes["output"]
        _check_attention_experts(prefix, shape, layer.attention_experts, hidden)
    _check_indexer(prefix, spec, layer.indexer, width)
    if spec.has_query_scale != (layer.query_scale is not None):
        raise CheckpointError(f"{prefix}only one of the spec and the weights scales queries")
    if layer.query_scale is not None:
        _check_query_scale(prefix, layer.query_scale, shape.num_heads)
    has_own_keys = spec.cache_layer is None
    if not has_own_keys:
        del sizes["key"]
    if not (has_own_keys and spec.has_value):
        sizes.pop("value", None)
    for name, size in sizes.items():
        linear = getattr(layer, name)
        if linear is None:
            raise CheckpointError(f"{prefix}{name} is missing")
        _check_linear(prefix + name, linear, size)
    has_norm = spec.qk_norm in ("head", "heads", "full")
    vectors = {
        "query_norm": (q_size if is_full_norm else dim) if has_norm else None,
        "key_norm": (kv_size if is_full_norm else dim) if has_norm and has_own_keys else None,
        "sinks": shape.num_heads if spec.has_sinks else None,
        "attention_inner_norm": value_size if spec.has_attention_inner_norm else None,
    }
    for name, length in vectors.items():
        if length is not None:
            _check_vector(prefix + name, getattr(layer, name), length)
    _check_bias(f"{prefix}query_norm_bias", layer.query_norm_bias, q_size)
    _check_bias(f"{prefix}key_norm_bias", layer.key_norm_bias, kv_size)
    biases = None if layer.distance_biases is None else layer.distance_biases.ravel()
    if (biases is not None) != (spec.bias_reach > 0):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has biases")
    if biases is not None:
        length = shape.num_heads * (2 * spec.bias_reach + 1)
        _check_vector(f"{prefix}biases by distance", biases, length)
    if (layer.relative_positions is not None) != spec.has_relative_positions:
        raise CheckpointError(f"{prefix}only one of the spec and the weights is disentangled")
    if layer.relative_positions is not None:
        positions = layer.relative_positions
        count = shape.num_heads * positions.keys.shape[1] * dim
        for stack in (positions.keys, positions.queries):
            _check_vector(f"{prefix}relative positions", stack.ravel(), count)
    if (layer.attention_gate is None) != (spec.attention_gate is None):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has an attention gate")
    if layer.attention_gate is not None:
        num_gates = shape.num_heads if spec.gates_heads else sizes["output"][1]
        reads_query = spec.low_rank_query is not None and spec.low_rank_query.has_raw
        gate_width = query_width if reads_query else width
        _check_linear(f"{prefix}attention_gate", layer.attention_gate, (num_gates, gate_width))


def _check_shared_key(
    prefix: str, spec: LayerSpec, shape: Attention, weights: SharedKeyWeights, width: int
) -> None:
    own = spec.shared_key
    assert own is not None, "checked by `_check_attention`"
    size = own.output_rank, shape.num_heads // own.output_groups * shape.head_dim
    if len(weights.parts) != own.output_groups:
        raise CheckpointError(f"{prefix}{len(weights.parts)} groups of heads have a matrix")
    for weight in weights.parts:
        _check_matrix(f"{prefix}a group's output", weight, size)
    if (weights.entry is None) != (shape.entry_size is None):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has entries")
    if weights.entry is not None:
        _check_vector(f"{prefix}the norm of entries", weights.entry_norm, shape.head_dim)
        _check_entry(prefix, spec, shape, weights.entry, (shape.head_dim, width))


def _check_entry(
    prefix: str,
    spec: LayerSpec,
    shape: Attention,
    weights: EntryWeights,
    size: tuple[int, int],
) -> None:
    (numbers, width), own = size, spec.shared_key
    groups = 1 if own is None else 1 + own.has_overlap
    for name in ("values", "gates"):
        linear = getattr(weights, name)
        _check_linear(f"{prefix}the {name} of entries", linear, (groups * numbers, width))
    count = shape.key_positions * groups * numbers
    _check_vector(f"{prefix}the biases of entries", weights.bias.ravel(), count)


def _check_query(prefix: str, spec: LowRankQuery | None, layer: LayerWeights, width: int) -> None:
    if (spec is None) != (layer.query_down is None):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has low-rank queries")
    if spec is not None and layer.query_down is not None:
        _check_linear(f"{prefix}query_down", layer.query_down, (spec.rank, width))
        _check_vector(f"{prefix}the query's inner norm", layer.query_down_norm, spec.rank)


def _check_latent(
    prefix: str, spec: LatentSpec, shape: Attention, weights: LatentWeights | None, has_norm: bool
) -> None:
    rank = shape.value_dim
    if weights is None:
        raise CheckpointError(f"{prefix}only one of the spec and the weights has a latent product")
    if has_norm:
        _check_vector(f"{prefix}the latent norm", weights.norm, rank)
    if (weights.rotary_norm is not None) != spec.has_rotary_norm:
        raise CheckpointError(f"{prefix}only one of the spec and the weights has a rotary norm")
    if weights.rotary_norm is not None:
        _check_vector(f"{prefix}the rotary norm", weights.rotary_norm, shape.head_dim - rank)
    for name, matrices, size in (
        ("keys", weights.keys, (rank, spec.key_dim)),
        ("values", weights.values, (spec.value_dim, rank)),
    ):
        if len(matrices) != shape.num_heads or len({weight.format for weight in matrices}) > 1:
            raise CheckpointError(
                f"{prefix}{name}: the weights have {len(matrices)} matrices; allowed are"
                f" {shape.num_heads}, one per head, in one format"
            )
        for weight in matrices:
            _check_matrix(f"{prefix}a head's {name}", weight, size)


def _check_convolved(
    prefix: str, shape: Attention, weights: ConvolvedAttention, hidden: int
) -> None:
    heads, dim = shape.num_heads + shape.num_kv_heads, shape.head_dim
    half = shape.num_kv_heads * dim // 2
    _check_linear(f"{prefix}delayed values", weights.delayed, (half, hidden))
    if weights.delayed_bias is not None:
        _check_matrix(f"{prefix}the bias of delayed values", weights.delayed_bias, (1, half))
    for vector in (weights.own, weights.before):
        _check_vector(f"{prefix}the convolution", vector, heads * dim)
    for mixes in (weights.mixes, weights.mixes_before):
        if len(mixes) != heads:
            raise CheckpointError(f"{prefix}the convolution has {len(mixes)} heads, not {heads}")
        for weight in mixes:
            _check_matrix(f"{prefix}the convolution", weight, (dim, dim))
    _check_matrix(f"{prefix}the bias of the convolution", weights.bias, (1, heads * dim))
    _check_vector(f"{prefix}the factors of keys", weights.key_factors, shape.num_kv_heads * dim)


def _check_router_states(
    prefix: str, spec: LayerSpec, layer: LayerWeights, hidden: int, size: int, is_first: bool
) -> None:
    """Check the router of a layer whose states have `size` numbers, and the biases of sums."""
    router = layer.router_states
    if (router is not None) != (spec.memory == "routes"):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has router states")
    for bias in (layer.attention_sum_bias, layer.mlp_sum_bias):
        if bias is not None:
            _check_matrix(f"{prefix}the bias of a sum", bias, (1, hidden))
    if router is None:
        return
    _check_linear(f"{prefix}the router's down", router.down, (size, hidden))
    for linear in (router.first, router.second):
        _check_linear(f"{prefix}the router's MLP", linear, (size, size))
    _check_vector(f"{prefix}the router's norm", router.norm, size)
    if (router.factors is None) != is_first:
        raise CheckpointError(f"{prefix}all routers but the first read those before them")
    if router.factors is not None:
        _check_vector(f"{prefix}the factors of router states", router.factors, size)


def _check_attention_experts(
    prefix: str, shape: Attention, weights: AttentionExperts, hidden: int
) -> None:
    count, size = weights.router.weight.out_features, shape.num_kv_heads * shape.head_dim
    _check_linear(f"{prefix}the router of queries", weights.router, (count, hidden))
    _check_matrix(f"{prefix}the bias of experts of queries", weights.bias, (1, hidden))
    for name, matrices, full in (
        ("queries", weights.queries, (size, hidden)),
        ("outputs", weights.outputs, (hidden, size)),
    ):
        if len(matrices) != count or len({weight.format for weight in matrices}) > 1:
            raise CheckpointError(
                f"{prefix}{name}: the weights have {len(matrices)} matrices; allowed are {count},"
                " one per expert, in one format"
            )
        for weight in matrices:
            _check_matrix(f"{prefix}an expert's {name}", weight, full)


def _check_indexer(
    prefix: str, spec: LayerSpec, weights: IndexerWeights | None, width: int
) -> None:
    if (spec.indexer is None) != (weights is None):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has an indexer")
    if spec.indexer is None or weights is None:
        return
    heads, dim = spec.indexer.num_heads, spec.indexer.head_dim
    has_inputs = spec.low_rank_query is None or spec.indexer.has_own_query
    inner = width if has_inputs or not spec.low_rank_query else spec.low_rank_query.rank
    _check_linear(f"{prefix}the indexer's query", weights.query, (heads * dim, inner))
    if isinstance(weights.key, Linear):
        _check_linear(f"{prefix}the indexer's key", weights.key, (dim, width))
    else:
        assert spec.attention is not None
        _check_entry(prefix, spec, spec.attention, weights.key, (dim, width))
    if spec.indexer.has_own_query:
        for norm in (weights.input_norm, weights.input_norm_bias):
            _check_vector(f"{prefix}the norm of the indexer's inputs", norm, width)
        if weights.query_scale is None:
            raise CheckpointError(f"{prefix}the indexer's queries have no factors")
        _check_query_scale(f"{prefix}the indexer's ", weights.query_scale, heads)
    vectors = [weights.norm]
    if spec.indexer.has_weights:
        assert weights.weights is not None
        _check_linear(f"{prefix}the indexer's weights", weights.weights, (heads, width))
        vectors += [] if weights.norm_bias is None else [weights.norm_bias]
    else:
        assert weights.query_norm is not None
        vectors.append(weights.query_norm)
    for vector in vectors:
        _check_vector(f"{prefix}the indexer's norm", vector, dim)


def _check_query_scale(prefix: str, weights: QueryScale, heads: int) -> None:
    for name, vector in vars(weights).items():
        _check_vector(f"{prefix}{name} of the factors of queries", vector, heads)


def _check_recurrent(
    prefix: str, spec: RecurrentSpec, weights: RecurrentWeights, hidden: int
) -> None:
    shape, vectors = spec.shape, weights.vectors
    is_kda, width = shape.rule == "kda", hidden
    has_own_keys = is_kda or (shape.rule == "delta" and weights.keys is not None)
    num_inputs = shape.width_out if has_own_keys else shape.width
    _check_linear(f"{prefix}inputs", weights.inputs, (num_inputs, hidden))
    if weights.gate_down is not None:
        width = weights.gate_down.weight.out_features
        _check_linear(f"{prefix}gate_down", weights.gate_down, (width, hidden))
    _check_linear(f"{prefix}gate", weights.gate, (shape.width_out, width))
    _check_linear(f"{prefix}output", weights.output, (hidden, shape.width_out))
    if has_own_keys:
        num_keys = shape.num_groups * shape.state_size
        for name in ("keys", "queries"):
            _check_part(prefix, name, weights, (num_keys, hidden))
    if is_kda:
        _check_kda_gates(prefix, shape, weights, hidden)
    elif shape.rule == "selective":
        _check_selective_gates(prefix, shape, weights)
    elif shape.rule == "lru":
        _check_blocks(prefix, shape, weights)
    elif (weights.gates is None) != (shape.rule in ("conv", "retention")):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has gates")
    elif weights.gates is not None:
        _check_linear(f"{prefix}gates", weights.gates, (shape.num_gates, hidden))
    if weights.input_gate is not None:
        _check_linear(f"{prefix}input_gate", weights.input_gate, (shape.width, hidden))
    _check_vector(f"{prefix}conv", vectors.conv.ravel(), shape.width * shape.window)
    _check_bias(f"{prefix}conv_bias", vectors.conv_bias, shape.width)
    if shape.rule != "conv":
        count, size = shape.num_heads, 1
        if shape.rule == "selective":
            count, size = shape.width_out, shape.state_size
        if shape.rule == "lru":
            count = shape.width_out
        decay = None if vectors.decay is None else vectors.decay.ravel()
        _check_vector(f"{prefix}decay", decay, count * size)
        num_biases = 2 * count if shape.rule == "lru" else count
        num_biases = count * shape.state_size if is_kda else num_biases
        if shape.rule != "retention":
            _check_vector(f"{prefix}step_bias", vectors.step_bias, num_biases)
        _check_bias(f"{prefix}skip", vectors.skip, count)
    if spec.norm is not None:
        size = 0 if weights.norm is None else weights.norm.size
        if size * spec.norm_groups != shape.width_out:
            _check_vector(f"{prefix}norm", weights.norm, shape.width_out)


def _check_mlstm(prefix: str, shape: Recurrence, weights: Mlstm, hidden: int) -> None:
    heads, size, num_keys = shape.num_heads, shape.width_out, shape.num_heads * shape.state_size
    rows = {"keys": num_keys, "queries": num_keys, "input_gate": heads, "forget_gate": heads}
    for name, linear in weights.linears.items():
        full = (hidden, size) if name == "output" else (rows.get(name, size), hidden)
        _check_linear(prefix + name, linear, full)
    _check_vector(f"{prefix}the norm of heads", weights.norm, size)
    number(f"{prefix}norm_eps", weights.norm_eps, 0.0, 1.0)
    number(f"{prefix}gate_cap", weights.gate_cap)


def _check_blocks(prefix: str, shape: Recurrence, weights: RecurrentWeights) -> None:
    for name in ("input_blocks", "recurrence_blocks"):
        blocks = getattr(weights, name)
        if len(blocks) != shape.num_heads or len({block.format for block in blocks}) > 1:
            raise CheckpointError(
                f"{prefix}{name}: the weights have {len(blocks)} matrices; allowed are"
                f" {shape.num_heads}, one per head, in one format"
            )
        for block in blocks:
            _check_matrix(f"{prefix}{name}", block, (shape.head_dim, shape.head_dim))


def _check_mixes(
    prefix: str, spec: LayerSpec, layer: LayerWeights, hidden: int, is_first: bool
) -> None:
    """Check the weights of RWKV's time mixing and channel mixing."""
    weights = layer.recurrent if isinstance(layer.recurrent, TimeMix) else None
    rule = None if spec.recurrence is None else spec.recurrence.shape.rule
    kinds = {"wkv": TimeMixWeights, **dict.fromkeys(("wkv6", "gla"), DynamicMixWeights)}
    if type(weights) is not kinds.get(str(rule), type(None)):
        raise CheckpointError(f"{prefix}only one of the spec and the weights mixes positions")
    has_mlp_mix = weights is not None and spec.mlp == "plain"
    if (layer.mlp_mix is not None) != has_mlp_mix:
        raise CheckpointError(f"{prefix}only one of the sublayers mixes positions")
    if weights is None:
        return
    if has_mlp_mix:
        _check_vector(f"{prefix}the mix of the MLP's inputs", layer.mlp_mix, hidden)
    linears = weights.linears
    if isinstance(weights, DynamicMixWeights):
        _check_vector(f"{prefix}the first mix", weights.first_mix, hidden)
        _check_vector(f"{prefix}the mixes", weights.mixes.ravel(), 5 * hidden)
        rank, down = weights.rank, linears.pop("mix_down")
        _check_linear(f"{prefix}mix_down", down, (5 * rank, hidden))
        for linear in weights.mix_ups:
            _check_linear(f"{prefix}mix_up", linear, (hidden, rank))
        if has_mlp_mix:
            _check_vector(f"{prefix}the mix of the receptance", layer.mlp_receptance_mix, hidden)
            if layer.mlp_receptance is None:
                raise CheckpointError(f"{prefix}mlp_receptance is missing")
            linears["mlp_receptance"] = layer.mlp_receptance
    elif isinstance(weights, TimeMixWeights):
        count = 5 if weights.gate is None else 6
        _check_vector(f"{prefix}the mixes", weights.mixes.ravel(), count * hidden)
        if (weights.value_mix is None) != is_first:
            raise CheckpointError(f"{prefix}all layers but the first mix their values")
    assert spec.recurrence is not None, "its rule is one of time mixing"
    num_keys = spec.recurrence.shape.num_groups * spec.recurrence.shape.state_size
    for name, linear in linears.items():
        size = num_keys if name in ("key", "value") else hidden
        _check_linear(prefix + name, linear, (size, hidden))
    for name, product in weights.products.items():
        rank = product.down.weight.out_features
        _check_linear(f"{prefix}{name}, down", product.down, (rank, hidden))
        _check_linear(f"{prefix}{name}, up", product.up, (hidden, rank))
    vectors = weights.vectors
    required = {"wkv": ("bonus", "key_scale", "key_rate"), "wkv6": ("bonus", "norm"), "gla": ()}
    names = [*required[str(rule)], *(("norm", "norm_bias") if vectors.norm is not None else ())]
    for name in names:
        _check_vector(prefix + name, getattr(vectors, name), hidden)


def _check_kda_gates(
    prefix: str, shape: Recurrence, weights: RecurrentWeights, hidden: int
) -> None:
    rank = hidden
    if weights.step_down is not None:
        rank = weights.step_down.weight.out_features
        _check_part(prefix, "step_down", weights, (rank, hidden))
    _check_part(prefix, "strengths", weights, (shape.num_heads, hidden))
    _check_part(prefix, "gates", weights, (shape.num_heads * shape.state_size, rank))


def _check_part(prefix: str, name: str, weights: RecurrentWeights, shape: tuple[int, int]) -> None:
    """Check a matrix that a recurrent sublayer must have."""
    linear = getattr(weights, name)
    if linear is None:
        raise CheckpointError(f"{prefix}{name} is missing")
    _check_linear(prefix + name, linear, shape)


def _check_selective_gates(prefix: str, shape: Recurrence, weights: RecurrentWeights) -> None:
    num_keys = shape.num_groups * shape.state_size
    rank = 0 if weights.gates is None else weights.gates.weight.in_features
    for name, size in (
        ("keys", (num_keys, shape.width)),
        ("queries", (num_keys, shape.width)),
        ("step_down", (rank, shape.width)),
        ("gates", (shape.width_out, rank)),
    ):
        _check_part(prefix, name, weights, size)
    for index, norm in enumerate(weights.gate_norms):
        _check_vector(f"{prefix}norm {index} of gates", norm, (num_keys, num_keys, rank)[index])


def _check_mlp(prefix: str, spec: LayerSpec, mlp: Mlp, hidden: int) -> None:
    if not isinstance(mlp, Experts):
        if spec.num_experts:
            raise CheckpointError(
                f"{prefix}mlp: the weights have one MLP, the spec has {spec.num_experts} experts"
            )
        kind = "plain" if isinstance(mlp, PlainMlp) else "gated"
        if spec.mlp != kind:
            raise CheckpointError(f"{prefix}mlp: the weights are {kind}, the spec is {spec.mlp}")
        _check_dense(prefix, mlp, hidden)
        return
    count, routed = spec.num_experts, mlp.routed
    read = mlp.router.weight.in_features if spec.memory == "routes" else hidden
    _check_linear(f"{prefix}router", mlp.router, (count, read))
    is_plain = spec.mlp == "plain"
    kinds = ("up", "down") if is_plain else ("gate", "up", "down")
    counts = {len(getattr(routed, kind)) for kind in kinds}
    num_matrices = count if spec.routing is None else count - spec.routing.num_identity
    if counts != {num_matrices} or (is_plain and routed.gate):
        raise CheckpointError(
            f"{prefix}experts: the weights have {len(routed.up)}, the spec has {num_matrices}"
        )
    if spec.memory == "shortcut" and (mlp.shared is None or mlp.latent_down is not None):
        raise CheckpointError(f"{prefix}there is no MLP beside the experts of a shortcut")
    if mlp.shared is not None and isinstance(mlp.shared, PlainMlp) != is_plain:
        raise CheckpointError(f"{prefix}the shared expert: the spec is {spec.mlp}")
    if mlp.router_norm is not None:
        _check_vector(f"{prefix}the router's norm", mlp.router_norm.weight, count)
    inner, size = routed.up[0].out_features, hidden
    if (mlp.latent_down is None) != (mlp.latent_up is None):
        raise CheckpointError(f"{prefix}only one of the two latent projections of experts")
    if mlp.latent_down is not None and mlp.latent_up is not None:
        size = routed.up[0].in_features
        _check_linear(f"{prefix}latent_down", mlp.latent_down, (size, hidden))
        _check_linear(f"{prefix}latent_up", mlp.latent_up, (hidden, size))
    if (mlp.input_norm is not None) != spec.experts_read_inputs:
        raise CheckpointError(f"{prefix}only one of the spec and the weights norms experts' inputs")
    if mlp.input_norm is not None:
        _check_vector(f"{prefix}the norm of the layer's inputs", mlp.input_norm.weight, hidden)
    if (mlp.adjugate is None) != (spec.adjugate is None):
        raise CheckpointError(f"{prefix}only one of the spec and the weights has further experts")
    if mlp.adjugate is not None and spec.adjugate is not None:
        groups, part = count // spec.adjugate.logits_per_expert, mlp.adjugate.up[0].out_features
        for kind in kinds:
            if len(getattr(mlp.adjugate, kind)) != groups:
                raise CheckpointError(f"{prefix}there are not {groups} further experts")
            for weight in getattr(mlp.adjugate, kind):
                _check_matrix(
                    f"{prefix}a further expert's {kind}", weight, _shape(kind, part, size)
                )
    for kind in kinds:
        shape = _shape(kind, inner, size)
        biases = getattr(routed, f"{kind}_bias") or [None] * num_matrices
        for weight, bias in zip(getattr(routed, kind), biases, strict=True):
            _check_linear(f"{prefix}an expert's {kind}", Linear(weight, bias), shape)
    if routed.selection_bias is not None:
        _check_vector(f"{prefix}the selection bias", routed.selection_bias, count)
    if routed.factors is not None:
        _check_vector(f"{prefix}the experts' factors", routed.factors, count)
    if mlp.latent_norm is not None:
        _check_vector(f"{prefix}the norm of the experts' inputs", mlp.latent_norm.weight, size)
    if mlp.latent_output_norm is not None:
        norm = mlp.latent_output_norm.weight
        _check_vector(f"{prefix}the norm of the experts' sum", norm, size)
    has_output_norm = spec.routing is not None and spec.routing.output_eps is not None
    if has_output_norm != (routed.output_factors is not None):
        raise CheckpointError(f"{prefix}only one of the spec and the weights norms outputs")
    if routed.output_factors is not None:
        _check_vector(f"{prefix}the factors of the experts' outputs", routed.output_factors, size)
    if mlp.bias is not None:
        _check_matrix(f"{prefix}the bias of the experts' sum", mlp.bias, (1, hidden))
    if mlp.norms is not None:
        for name, norm in vars(mlp.norms).items():
            _check_vector(f"{prefix}the experts' {name} norm", norm, hidden)
        if mlp.shared is None:
            raise CheckpointError(f"{prefix}the experts have norms, but there is no MLP")
    if mlp.shared is not None:
        _check_dense(f"{prefix}shared expert's ", mlp.shared, hidden)
    if mlp.shared_gate is not None:
        _check_matrix(f"{prefix}the shared expert's gate", mlp.shared_gate, (1, hidden))


def _check_dense(prefix: str, mlp: GatedMlp | PlainMlp, hidden: int) -> None:
    inner = mlp.up.weight.out_features
    for name, linear in vars(mlp).items():
        _check_linear(prefix + name, linear, _shape(name, inner, hidden))


def _shape(name: str, inner: int, hidden: int) -> tuple[int, int]:
    """The shape of a matrix of an MLP."""
    return (hidden, inner) if name == "down" else (inner, hidden)


def _check_linear(name: str, linear: Linear, shape: tuple[int, int]) -> None:
    _check_matrix(name, linear.weight, shape)
    if linear.update is not None:
        rank = linear.update[0].out_features
        for weight, size in zip(linear.update, ((rank, shape[1]), (shape[0], rank)), strict=True):
            _check_matrix(f"{name}, its update", weight, size)
    if linear.bias is not None:
        _check_vector(f"{name} bias", linear.bias, shape[0])


def _check_matrix(name: str, weight: Weight, shape: tuple[int, int]) -> None:
    found = (weight.out_features, weight.in_features)
    if found != shape or min(shape) < 1:
        raise CheckpointError(f"{name} is a matrix of shape {found}, not {shape}")
    check_weight(weight)


def _check_bias(name: str, vector: np.ndarray | None, size: int) -> None:
    if vector is not None:
        _check_vector(name, vector, size)


def _check_vector(name: str, vector: np.ndarray | None, size: int) -> None:
    found = None if vector is None else (vector.dtype, tuple(vector.shape))
    if found != (np.dtype(np.float32), (size,)):
        raise CheckpointError(f"{name} is {found}, not float32 of shape {(size,)}")
