"""The architecture of a transformer: everything in which the supported families
differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from anydecode.kernels.interface import (
    RULES,
    TIME_MIX_RULES,
    Activation,
    Attention,
    ClampedSwiglu,
    Recurrence,
    Rope,
    Routing,
    SituGlu,
)
from anydecode.models.limits import (
    MAX_COUNT,
    MAX_EXPERTS,
    MAX_FACTOR,
    MAX_LAYERS,
    MAX_STREAMS,
    MAX_TOKENS,
    MAX_WINDOW,
    ConfigError,
    integer,
    number,
    refusal,
)

#: Maximum number of heads of a drafter with one head per drafted token.
MAX_STEPS = 32

#: Maximum number of positions that an entry stands for, and of kinds of layers whose rows attend
#: to entries or selected positions.
MAX_ENTRY, MAX_SELECTIONS = 256, 4
#: Maximum number of modules for further tokens; each predicts the token after that of the module
#: before it.
MAX_MODULES = 8

#: The architecture of drafters that are an early exit of their target.
EARLY_EXIT = "EarlyExit"
#: That of drafters of Chimera, Falcon and ParallelSpec.
CHIMERA, FALCON, PARALLELSPEC = "Chimera", "Falcon", "ParallelSpec"


@dataclass(frozen=True)
class TimeSpec:
    """How a diffusion model reads the time of the diffusion, which runs from 1 (noise) to 0 (text).

    Attributes:
        size: Numbers of the condition that is made of a time.
        reads_noise: Whether the embedding of times receives -log of the share of tokens that are
            not noise (Duo), else the time itself (GIDD).
        margin: The smallest time, and the distance of the largest one from 1; if the noise is
            read, the share of tokens that are not noise at time 1.
        uniform: The largest share of random tokens in the noise (GIDD); 0: one of the two kinds of
            noise only.
        modulates_inputs: Whether the time changes the inputs and the outputs of whole layers (see
            `InputModulation`), not those of their sublayers.
    """

    size: int
    reads_noise: bool
    margin: float
    uniform: float = 0.0
    modulates_inputs: bool = False

    def value(self, time: float) -> float:
        """What the embedding of times receives at `time`."""
        if self.reads_noise:
            return -math.log(1 - (1 - self.margin) * time)
        return min(max(time, self.margin), 1 - self.margin)


@dataclass(frozen=True)
class RecurrentSpec:
    """The architecture of a recurrent sublayer.

    Attributes:
        shape: The convolution and the recurrence.
        gate: The activation of the gate that multiplies their output.
        norm: Whether that output is normed "before" the gate, "after" it, or not (None).
        norm_groups: The number of equal parts of the output that are normed separately.
        norm_eps: Of that norm; None: that of the model's norms.
        gate_norm_eps: With the rule "selective": the epsilon of the RMS norms of the keys, of the
            queries, and of the input of the product that gives the steps (Falcon-Mamba, Jamba);
            None for no norms.
    """

    shape: Recurrence
    gate: str = "silu"
    norm: str | None = None
    norm_groups: int = 1
    norm_eps: float | None = None
    gate_norm_eps: float | None = None


@dataclass(frozen=True)
class LatentSpec:
    """The projections of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    A position's only key is a latent of `Attention.latent_dim` numbers, followed by a part with
    rotary position embedding (or none: Kimi Linear). The matrices from the latent to the keys and
    values of each head are applied to the queries and to the output of the attention instead. Each
    head's query has `key_dim` numbers, followed by its part with rotary position embedding.

    Attributes:
        key_dim: Numbers of a head's key, without those with rotary position embedding.
        value_dim: Numbers of a head's value.
        norm_eps: Of the norm of the latent.
        growth: Multiplies the parts of queries without position embedding by its factor, where
            `LayerSpec.query_rope` multiplies the others; its frequencies are 0. None: no factor.
        has_rotary_norm: Whether the part of the key with rotary position embedding is normed too,
            before it is rotated (dots3-note).
    """

    key_dim: int
    value_dim: int
    norm_eps: float = 1e-6
    growth: Rope | None = None
    has_rotary_norm: bool = False


@dataclass(frozen=True)
class IndexerSpec:
    """An indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556; MiniMax-M3).

    It selects the `Attention.top_k` positions that a row attends to, see `Backend.select`.

    Queries and keys have the layer's rotary position embedding. DeepSeek's published code
    multiplies both by the same orthogonal matrix (Hadamard), which does not change their products,
    and rounds them to eight bits. With `Attention.has_block_keys` the key of a block is made of the
    normed keys of its positions (`Backend.pool`).

    Attributes:
        num_heads: Heads, which share one key.
        head_dim: Numbers of a query and of the key, a multiple of 8.
        interleaved_rope: Whether checkpoints store rows for rotary pairs (2i, 2i + 1) (GLM-5).
        has_last_rope: Whether checkpoints store the rows that rotate behind the others (Hy4).
        norm_eps: Of the norm of keys, and of queries.
        key_rope: The rotary position embedding of keys of blocks that are the normed means of the
            keys of their positions (Qwen3.8), that of the first of them; the heads' scores are
            added without weights then. None: other keys.
        has_own_query: Whether queries are made of the attention's inputs, which have a layer norm
            of the indexer's, and have factors (`LayerSpec.has_query_scale`).
        has_weights: Whether the heads' scores are weighted and added, and keys have a layer norm.
            Else each head selects for its part of the key heads (MiniMax-M3), and both keys and
            queries have an RMS norm.
    """

    num_heads: int
    head_dim: int
    interleaved_rope: bool = False
    has_last_rope: bool = False
    norm_eps: float = 1e-6
    has_weights: bool = True
    has_own_query: bool = False
    key_rope: Rope | None = None


@dataclass(frozen=True, eq=False)
class SharedKeySpec:
    """Attention whose heads share one key, which is their value too (DeepSeek-V4).

    Its output is rotated back by the position of its row, so that it depends on distances alone.
    With `Attention.entry_size`, rows also attend to entries, each of which is made of the inputs at
    several positions (`Backend.pool`) and has the rotary position embedding of the first of them.
    So have the keys of an indexer of entries.

    Attributes:
        output_groups: Equal groups of heads, whose outputs are multiplied by a matrix of their own
            before the output matrix.
        output_rank: Numbers of the product of a group.
        output_rope: The rotary position embedding of the output.
        entry_rope: That of entries; None without entries.
        has_overlap: Whether an entry is also made of the positions of the entry before.
    """

    output_groups: int
    output_rank: int
    output_rope: Rope
    entry_rope: Rope | None = None
    has_overlap: bool = False


@dataclass(frozen=True)
class HyperSpec:
    """The hyper-connections of a model, see `models/hyper.py`.

    Attributes:
        iterations: How often the columns of the matrices that mix streams are balanced.
        eps: Added to numbers and sums.
        has_mean: Whether the mean of the streams after the last layer is taken (GLM-5.3), not a sum
            with factors that depend on the row.
        magnitude: If given, streams are not mixed, and the factors of a sublayer's output are so
            many times a sigmoid plus `eps` (Hy4).
    """

    iterations: int
    eps: float
    has_mean: bool = False
    magnitude: float | None = None

    def num_factors(self, streams: int) -> int:
        """The factors of a sublayer."""
        return streams * (2 + (streams if self.magnitude is None else 0))


@dataclass(frozen=True)
class LowRankQuery:
    """Queries that are the product of two matrices with an RMS norm in between: those of multi-head
    latent attention, and of multi-matrix factorization attention (Hu et al., arXiv:2412.19255),
    whose heads share one key and one value.

    Attributes:
        rank: Numbers between the two matrices.
        norm_eps: Of the norm.
        has_raw: Whether the second matrix reads the numbers before the norm too, behind the normed
            ones (A.X K2). The gate of the attention reads both then, and has a number for each of
            its output.
    """

    rank: int
    norm_eps: float = 1e-6
    has_raw: bool = False

    @property
    def width(self) -> int:
        """Numbers that the second matrix reads."""
        return self.rank * (1 + self.has_raw)


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """The architecture of one layer.

    Its first sublayer is attention, recurrent, the sum of both, or missing.

    Attributes:
        attention: The shape of the attention; None for no attention.
        rope: The rotary position embedding; None for no position embedding (SmolLM3).
        norms: Where the norms are: "pre" (most families), "post" (OLMo 2: on the output of each
            sublayer only), "both" (Gemma 2 and 3), "sum" (BERT: on the sum of a sublayer's input
            and output), "stream" (MiniMax-Text-01: on each sublayer's input, which is added to its
            output as normed), "none" (Qwen3.8, whose streams are normed).
        has_second_sum: With the norms "sum", whether the attention's input is added to its normed
            sum once more, and that sum is normed too (Jina's model of code).
        sum_factors: With the norms "stream", the factors of the first sublayer's input and output
            in their sum, and of the MLP's.
        qk_norm: The norm of queries and keys: None, "head" (each head, all with the same weights;
            Qwen3, Gemma 3), "heads" (each head, with weights of its own; Command R+, StableLM 2),
            "full" (OLMo 2) or "plain" (each head, without weights; Llama 4). A layer norm, which
            "heads" and "full" may be, if `ModelSpec.norm` is one.
        activation: The activation of the MLP, "silu", "gelu_tanh", "gelu", "relu", "relu2" or, of a
            gated MLP, a class of `Activation`, of a plain one, "xielu" (`LayerWeights.xielu`).
        shared_activation: That of the MLP beside experts that every token runs through, if it is
            another.
        num_experts: The number of experts; 0 for a dense MLP.
        routing: How a token's experts are chosen; None for a dense MLP.
        routes_inputs: Whether the router reads the inputs of the layer, without a norm
            (SmallThinker), and not those of the experts.
        experts_read_inputs: Whether the experts and their router read the inputs of the layer, with
            a norm of their own (Arctic), and the MLP beside them alone what is behind the mixer.
        adjugate: How the groups of experts are weighed that each have a further expert (GroveMoE);
            None: there are none.
        has_sinks: Whether each head has an attention sink (gpt-oss).
        query_rope: The rotary position embedding of queries, if it is another than that of keys
            (Ministral 3), which may have none (Llama 4).
        norm_after_rope: Whether queries and keys are normed after the rotary position embedding
            (Hunyuan), not before it.
        interleaved_rope: Whether checkpoints store query and key rows for rotary pairs (2i, 2i + 1)
            (GLM-4). They are reordered when they are loaded, as are the rows of adapters.
        mlp: "gated", "plain" (no gate; StarCoder2) or "none" (Mamba).
        is_parallel: Whether the MLP reads the input of the layer (GPT-NeoX), not that input plus
            the output of the attention.
        recurrence: The recurrent sublayer, if there is one.
        attention_gate: The function of a projection of the attention's input that multiplies its
            output: None for no gate, "sigmoid" (Qwen3-Next) or "softplus" (Laguna).
        gates_heads: Whether that gate has one number for each head (Laguna), not for each number.
        has_output_norm: Whether the output of the MLP is normed where `norms` does not say so
            (A.X-K1's experts).
        has_attention_inner_norm: Whether the input of the attention's output matrix is normed
            (BitNet).
        has_mlp_inner_norm: Whether the input of the MLP's last matrix is normed (BitNet).
        attention_norm_gate: The inner size of the gate of the attention's normed input (see
            `NormGate`); 0: there is none.
        mlp_norm_gate: The same of the MLP's.
        has_attention_norm: Whether the attention's input is normed, as `norms` says; False for the
            first layer of ModernBERT.
        latent: The projections of multi-head latent attention; None for other attention.
        indexer: The indexer that selects the positions to attend to; None: if `Attention.top_k` is
            set, they are those that an earlier layer has selected (GLM-5.2).
        low_rank_query: The product of which the queries are made; None for one matrix.
        shared_key: What attention has whose heads share one key as their value; None for other
            attention. Norms of queries have no weights then ("plain"), that of the key has.
        cache_layer: The earlier layer to whose keys and values the attention attends (Gemma 4); the
            layer has none of its own then, and stores nothing. None: its own.
        has_value: Whether there is a value matrix; without one, values are the keys before their
            norm and rotary position embedding (Gemma 4).
        has_value_norm: Whether each head's values are normed, without weights.
        has_scale: Whether the output of the layer is multiplied by a number of its weights.
        is_differential: Whether the attention is differential (see `DifferentialWeights`): a key
            and a value of its shape are those of two heads side by side, and a query is that of one
            head, beside zeros.
        has_distant_pairs: Whether a pair of heads of differential attention is one of the first
            half of the stored heads and one of the second half (DiffLlama), not two in sequence.
        bias_reach: The largest distance of a key and a row whose bias differs from that of larger
            ones, see `Backend.attend` (MPNet); 0: there are no such biases.
        has_relative_positions: Whether attention is disentangled (DeBERTa), see
            `RelativePositions`.
        memory: "makes" if the recurrence's output before its gate is the memory of later layers,
            "reads" if the first sublayer is a gated memory unit (SambaY), "side" if the layer
            computes the memory, a second stream of hidden states, from the sum of both streams, and
            adds a projection of it to the first (RemeDi), "embeddings" if it is attention and an
            MLP, whose attention reads the embeddings, the memory, beside the hidden states, and a
            recurrence, which reads the sum of a projection of the MLP's output and the hidden
            states (Zamba2), "shortcut" if the output of the experts beside its MLP is the memory,
            "adds" if the memory is added to the layer's output (LongCat-Flash), "joins" if the
            memory is added to the layer's input, "swaps" if that input becomes the memory besides
            (HRM-Text); None for none of these.
        ends_loop: Whether the output of the layer is normed by the model's final norm, because the
            layers behind it are those before it once more (Nanbeige).
        gate_cutoff: The gate of the MLP keeps what is above a threshold, which is subtracted: its
            mean plus so many standard deviations (Gemma 3n). None: no threshold.
        query_routing: How the experts of queries and outputs are chosen, see
            `models/attention_experts.py`; None: there are none.
        is_convolved: Whether queries and keys are convolved, and half of the values are those of
            the position before (`ConvolvedAttention`).
        has_key_bias: Whether the last number of each key is a bias of its scores (`KeyBias`).
        has_query_scale: Whether the heads' queries have factors that depend on the position
            (`QueryScale`).
        has_residual_gates: Whether the input of each sublayer is multiplied by factors
            (`LayerWeights.attention_residual`, `LayerWeights.mlp_residual`) before its output is
            added (Muse Spark).
        has_ngrams: Whether the layer adds embeddings of n-grams (see `models/ngrams.py`); its
            recurrence is their convolution, and it has nothing else.
        has_head_norm: Whether each head's output is normed, without weights, before a gate.
        qkv_limit: The largest absolute value of queries, keys and values, which are clamped after
            their products (MPT); None: no limit.
    """

    attention: Attention | None
    rope: Rope | None
    norms: str = "pre"
    has_second_sum: bool = False
    sum_factors: tuple[float, float, float, float] | None = None
    qk_norm: str | None = None
    activation: Activation = "silu"
    shared_activation: Activation | None = None
    num_experts: int = 0
    routing: Routing | None = None
    routes_inputs: bool = False
    experts_read_inputs: bool = False
    adjugate: Routing | None = None
    has_sinks: bool = False
    query_rope: Rope | None = None
    norm_after_rope: bool = False
    interleaved_rope: bool = False
    mlp: str = "gated"
    is_parallel: bool = False
    recurrence: RecurrentSpec | None = None
    attention_gate: str | None = None
    gates_heads: bool = False
    has_output_norm: bool = False
    has_attention_inner_norm: bool = False
    has_mlp_inner_norm: bool = False
    attention_norm_gate: int = 0
    mlp_norm_gate: int = 0
    has_attention_norm: bool = True
    latent: LatentSpec | None = None
    indexer: IndexerSpec | None = None
    low_rank_query: LowRankQuery | None = None
    shared_key: SharedKeySpec | None = None
    cache_layer: int | None = None
    has_value: bool = True
    has_value_norm: bool = False
    has_scale: bool = False
    qkv_limit: float | None = None
    gate_cutoff: float | None = None
    is_differential: bool = False
    has_distant_pairs: bool = False
    bias_reach: int = 0
    has_relative_positions: bool = False
    memory: str | None = None
    ends_loop: bool = False
    has_residual_gates: bool = False
    has_head_norm: bool = False
    has_query_scale: bool = False
    has_ngrams: bool = False
    query_routing: Routing | None = None
    has_key_bias: bool = False
    is_convolved: bool = False

    @property
    def of_shared_mlp(self) -> LayerSpec:
        """The layer as the MLP beside its experts has it."""
        own = self.shared_activation
        return self if own is None else replace(self, activation=own, shared_activation=None)

    @property
    def has_mixer(self) -> bool:
        """Whether there is a first sublayer."""
        is_unit = self.memory == "reads"
        return self.attention is not None or self.recurrence is not None or is_unit

    @property
    def norms_output(self) -> bool:
        """Whether the output of the MLP is normed."""
        return self.norms not in ("pre", "stream", "none") or self.has_output_norm

    @property
    def stores(self) -> bool:
        """Whether the layer stores keys and values, or inputs of a recurrence."""
        has_keys = self.attention is not None and self.cache_layer is None
        return has_keys or self.recurrence is not None

    @property
    def stored_inputs(self) -> Recurrence | None:
        """The shape of the inputs that the layer stores beside keys and values: those of a
        recurrence, of entries, of an indexer's keys of blocks, or of convolved queries."""
        shape, own = self.attention, self.shared_key
        if self.indexer is not None and shape is not None and shape.has_block_keys:
            numbers = self.indexer.head_dim * (2 if self.indexer.key_rope is None else 1)
            return Recurrence("pool", numbers, shape.index_block)
        if self.is_convolved and shape is not None:
            width = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
            return Recurrence("pool", 2 * width + shape.num_kv_heads * shape.head_dim // 2, 2)
        if own is None or shape is None or shape.entry_size is None:
            return None if self.recurrence is None else self.recurrence.shape
        groups = 1 + own.has_overlap
        numbers = 2 * groups * (shape.head_dim + (shape.index_dim or 0))
        return Recurrence("pool", numbers, groups * shape.entry_size)

    @property
    def query_dim(self) -> int:
        """Numbers of one head in the output of the query matrix."""
        assert self.attention is not None, "a layer with attention"
        if self.latent is None:
            dim = self.attention.head_dim - self.has_key_bias
            return dim // (2 if self.is_differential else 1)
        return self.latent.key_dim + self.attention.head_dim - self.attention.value_dim

    def query_order(self) -> np.ndarray | None:
        """The order in which the stored rows of the query matrix are loaded; None: as stored."""
        if self.attention is not None and self.has_distant_pairs:
            return self._pair_order(self.attention.num_heads)
        if self.attention is None or not self.interleaved_rope:
            return None
        first = 0 if self.latent is None else self.latent.key_dim
        return self._row_order(self.attention.num_heads, self.query_dim, first)

    def key_order(self) -> np.ndarray | None:
        """The order in which the stored rows of the key matrix are loaded; None: as stored."""
        shape = self.attention
        if self.has_distant_pairs:
            return self.value_order()
        if shape is None or not self.interleaved_rope:
            return None
        dim = shape.head_dim - self.has_key_bias
        return self._row_order(shape.num_kv_heads, dim, shape.latent_dim or 0)

    def value_order(self) -> np.ndarray | None:
        """The order in which the stored rows of the value matrix are loaded; None: as stored."""
        if self.attention is None or not self.has_distant_pairs:
            return None
        return self._pair_order(2 * self.attention.num_kv_heads)

    def _pair_order(self, num_heads: int) -> np.ndarray:
        """The order of the rows of `num_heads` heads, whose pairs become heads in sequence."""
        assert self.attention is not None, "differential attention"
        dim = self.attention.head_dim // 2
        rows = np.arange(num_heads * dim).reshape(2, num_heads // 2, dim)
        order: np.ndarray = rows.swapaxes(0, 1).ravel()
        return order

    def indexer_order(self, num_heads: int) -> np.ndarray | None:
        """The order in which stored rows of `num_heads` heads of the indexer are loaded; None: as
        stored."""
        indexer, rope = self.indexer, self.rope
        if indexer is None or rope is None:
            return None
        first = indexer.head_dim - 2 * rope.frequencies.size if indexer.has_last_rope else 0
        order = None
        if indexer.interleaved_rope:
            order = self._row_order(num_heads, indexer.head_dim, first)
        if not indexer.has_last_rope:
            return order
        order = np.arange(num_heads * indexer.head_dim) if order is None else order
        last: np.ndarray = np.roll(order.reshape(num_heads, -1), -first, 1).ravel()
        return last

    def _row_order(self, num_heads: int, dim: int, first: int) -> np.ndarray | None:
        """The order of `num_heads` times `dim` rows; the rotary ones of a head start at `first`."""
        if self.rope is None:
            return None
        half, head = self.rope.frequencies.size, np.arange(dim)
        last = first + 2 * half
        head[first:last] = head[first:last].reshape(half, 2).T.ravel()
        order: np.ndarray = (np.arange(num_heads)[:, None] * dim + head).ravel()
        return order


@dataclass(frozen=True)
class StateSpec:
    """The states that a drafter reads beside its tokens.

    A row at position p reads the target's state at position p - 1, or where the target has not
    computed it, the drafter's own: its hidden state of that row. States that are a "context" belong
    to their own positions instead.

    Attributes:
        taps: The target's states, by number of layers (0: its embeddings), side by side. Empty: its
            last hidden state after the final norm.
        target_size: The target's hidden size, times its streams where the drafter has as many.
        is_projected: Whether the target's states are multiplied by a matrix.
        num_target_norms: The norms of the target's states: none, 1 of all of them side by side, or
            one per tap.
        joins: Where embedding and state meet: in a "projection" before the first layer (EAGLE,
            multi-token prediction), in the "cells" of an LSTM there (Falcon), or in the first
            layer's "attention" (EAGLE-3), whose matrices read both side by side while its output is
            added to the state. As a "context" (DFlash) the target's states, projected and normed,
            are what every layer makes keys and values of, and the rows of tokens attend to these.
            "cross" (LongSpec): the last layer's keys and values are those of the states at their
            own positions, and only of positions whose states are known.
        has_norms: Whether embedding and state are normed where they meet.
        norms_streams: Whether each of several streams of a state is normed by itself there.
        has_embedding_norm: Whether the embedding alone is normed there.
        has_normed_residual: Whether the first layer's output is added to the normed state.
        feeds_normed: Whether the drafter's own states are those after its final norm.
        num_heads: The number of heads of a drafter with one head per drafted token, which drafts so
            many tokens at most (see `StepNetwork`); 0 for one head for all.
        reads_tokens: Whether the drafter reads drafted tokens; otherwise its own states follow
            from the target's state without a pass (Medusa).
        has_mask: Whether mask tokens read learned states in place of the target's (P-EAGLE,
            ParallelSpec), so that the drafter's own states are not used.
        stride: How many positions ahead of a row's own it predicts, token and state (Falcon); so
            many rows see each other. Where the drafter's own state stands in, it is that of the row
            so many positions before.
        delay: How many positions further back the target's state is: it predicts so many more
            tokens ahead of it (the further modules of MiMo-V2). No state of its own stands in.
    """

    taps: tuple[int, ...]
    target_size: int
    is_projected: bool = False
    num_target_norms: int = 0
    joins: str = "projection"
    has_norms: bool = False
    norms_streams: bool = False
    has_embedding_norm: bool = False
    has_normed_residual: bool = False
    feeds_normed: bool = False
    num_heads: int = 0
    reads_tokens: bool = True
    has_mask: bool = False
    stride: int = 1
    delay: int = 0

    @property
    def num_taps(self) -> int:
        """The number of the target's states per position."""
        return max(1, len(self.taps))

    @property
    def lag(self) -> int:
        """How many positions before a row's the state is that it reads."""
        return 0 if self.joins in ("context", "cross") else 1 + self.delay


@dataclass(frozen=True)
class BlockSpec:
    """The block that a drafter predicts in one pass: the text's last token, then mask tokens, which
    attend to each other and to the context (DFlash) or each to all before it (P-EAGLE, PARD); or
    the text's last tokens (`StateSpec.stride`).

    Attributes:
        size: The number of rows that it was trained with.
        mask_token: The token of all rows but the first; None: those of the text.
        predicts_next: Whether a row predicts the token behind its position (DSpark, P-EAGLE, PARD),
            not the token of it, so that the first row predicts too.
        causal_layers: The layers in which a row of the block sees only those before it.
    """

    size: int
    mask_token: int | None
    predicts_next: bool = False
    causal_layers: tuple[int, ...] = ()

    @property
    def max_drafts(self) -> int:
        """The number of tokens that a block predicts."""
        return self.size if self.predicts_next else self.size - 1


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """The architecture of a model. Norm weights that a family stores as an offset from 1 are
    converted when they are loaded."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    causal: bool = True
    logit_shift: int = 0  # 1: row r of the logits predicts r + 1 in a bidirectional model (Dream)
    block_size: int | None = None  # positions attend to their own block and those before it
    # Of a model with blocks: rows of the prompt and of finished blocks attend to what is before
    # them only, and blocks start at the end of the prompt.
    has_causal_context: bool = False
    # Whether rows of a causal context predict the next token, so that the last one before a block
    # predicts its first position, though the rows of blocks predict their own (Nemotron-Labs).
    context_predicts_next: bool = False
    # Of a model with blocks: the prompt is one block, and the others start at its end (RemeDi).
    has_prompt_block: bool = False
    # Whether rows of the block that is being denoised run as the variant `CANVAS`: with scales of
    # their own, windows that end where the block starts, and what the last pass has predicted as
    # an input (DiffusionGemma).
    has_canvas: bool = False
    time: TimeSpec | None = None  # of a diffusion model whose layers depend on the time
    mask_token: int | None = None  # of a diffusion model, if its config or its family says
    # Of a diffusion model whose noise is random tokens: the noise and the text have the tokens
    # before this one only. None: all.
    num_noise_tokens: int | None = None
    decoder: str | None = None  # the one that a diffusion model was published with
    # Of a diffusion model that edits: the token that removes a position, and the one that puts a
    # mask before a position (LLaDA2.2).
    edit_tokens: tuple[int, int] | None = None
    # Of a diffusion model that fills regions of variable length: the token that becomes two masks
    # (DreamOn).
    expand_token: int | None = None
    residual_scale: float = 1.0  # factor of each sublayer's output
    norm: str = "rms"  # or "layer"
    post_norm_eps: float | None = None  # of the norms of sublayers' outputs; None: `norm_eps`
    final_norm_eps: float | None = None  # of the final norm; None: `norm_eps`
    has_position_table: bool = False  # whether learned position embeddings are added (GPT-2)
    is_encoder: bool = False  # trained to represent texts: bidirectional, and cannot generate
    has_embedding_norm: bool = False  # whether the sum of the embeddings is normed (BERT)
    has_final_norm: bool = True
    # Of a square matrix in front of the head's, whose activated output is normed (ModernBERT as a
    # decoder); None: there is none.
    head_activation: str | None = None
    num_segments: int = 0  # rows of the table of token types, which is added to the embeddings
    # Numbers of a token's embedding for each layer beside that of the first (Gemma 4); 0: none.
    per_layer_size: int = 0
    per_layer_scale: float = 1.0  # factor of these embeddings
    # Streams of hidden states (Gemma 3n, see `models/streams.py`), and the one that layers compute.
    num_streams: int = 1
    active_stream: int = 0
    # The hyper-connections of these streams (DeepSeek-V4, see `models/hyper.py`); None: they have
    # none, and are those of Gemma 3n or of blocks.
    hyper: HyperSpec | None = None
    # Layers of a block, whose sum is a stream of its own (Kimi K3, `models/block_residuals.py`):
    # there is a stream for each block, and one for the current sum. 0: there are no such blocks.
    residual_block: int = 0
    # The rank of the gates through which sublayers read the streams (Qwen3.8, see
    # `models/gated_streams.py`); 0: there are none.
    stream_gate_rank: int = 0
    memory_size: int = 0  # numbers of a memory beside the hidden state (SambaY, RemeDi, Zamba2)
    states: StateSpec | None = None  # of a drafter that reads its target's states
    head_size: int = 0  # logits of a drafter whose head has fewer tokens; 0: one per token
    block: BlockSpec | None = None  # of a drafter that predicts several tokens per pass

    def __post_init__(self) -> None:
        """Raise CheckpointError, naming field and value, for values that are invalid or too large
        for the kernels' integers."""
        integer("vocab_size", self.vocab_size, 1, MAX_TOKENS)
        integer("hidden_size", self.hidden_size)
        integer("max_positions", self.max_positions)
        number("norm_eps", self.norm_eps, 0.0, 1.0)
        for name in ("post_norm_eps", "final_norm_eps"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), 0.0, 1.0)
        number("embedding_scale", self.embedding_scale)
        number("logit_scale", self.logit_scale)
        number("residual_scale", self.residual_scale)
        if self.logit_softcap is not None:
            number("logit_softcap", self.logit_softcap)
        integer("logit_shift", self.logit_shift, 0, 1)
        integer("num_segments", self.num_segments, 0, MAX_COUNT)
        size = integer("per_layer_size", self.per_layer_size, 0, MAX_COUNT)
        integer("per_layer_size * layers", size * len(self.layers), 0)
        number("per_layer_scale", self.per_layer_scale)
        streams = integer("num_streams", self.num_streams, 1, MAX_STREAMS)
        integer("hidden_size * num_streams", self.hidden_size * streams)
        integer("active_stream", self.active_stream, 0, streams - 1)
        if self.hyper is not None:
            _check_hyper(self, self.hyper)
        elif self.residual_block:
            _check_residual_blocks(self)
        elif self.stream_gate_rank:
            _check_stream_gates(self)
        elif streams > 1:
            _check_streams(self)
        integer("memory_size", self.memory_size, 0)
        integer("hidden_size + memory_size", self.hidden_size + self.memory_size)
        _check_memory(self)
        integer("head_size", self.head_size, 0, self.vocab_size)
        if self.states is not None:
            _check_states(self.states, self.hidden_size * self.num_streams)
        if self.block is not None:
            integer("block_size", self.block.size, 1 if self.block.predicts_next else 2, MAX_COUNT)
            if self.block.mask_token is not None:
                integer("mask_token_id", self.block.mask_token, 0, self.vocab_size - 1)
        if self.norm not in ("rms", "layer"):
            raise refusal("norm", self.norm, "one of ('rms', 'layer')")
        if self.block_size is not None:
            integer("block_size", self.block_size)
        elif self.has_causal_context or self.has_prompt_block:
            raise ConfigError("blocks that start at the end of the prompt need a size")
        if self.time is not None:
            integer("timestep_cond_dim", self.time.size)
            number("t_eps", self.time.margin, 1e-9, 0.1)
            number("p_uniform", self.time.uniform, 0.0, 0.9)
        if self.mask_token is not None:
            integer("mask_token_id", self.mask_token, 0, self.vocab_size - 1)
        if self.edit_tokens is not None:
            for name, token in zip(("delete", "split"), self.edit_tokens, strict=True):
                integer(f"{name}_token_id", token, 0, self.vocab_size - 1)
        if self.expand_token is not None:
            integer("expand_token_id", self.expand_token, 0, self.vocab_size - 1)
        integer("the number of layers", len(self.layers), 1, MAX_LAYERS)
        for index, layer in enumerate(self.layers):
            _check_layer(f"layer {index}: ", layer)
            if self.norm == "layer" and layer.qk_norm in ("head", "plain"):
                allowed = "None, heads or full with layer norms"
                raise refusal(f"layer {index}: qk_norm", layer.qk_norm, allowed)
            _check_cache_layer(f"layer {index}: ", self.layers, index)
            _check_mixes(f"layer {index}: ", self, layer)
            _check_selection(f"layer {index}: ", self.layers, index)
            if size and not isinstance(layer.activation, str):
                raise ConfigError(f"layer {index}: per_layer_size is set with a clamped SwiGLU")
        shapes = [x.attention for x in self.layers if x.attention and x.attention.is_selected]
        kinds = {x.selection_kind for x in shapes}
        integer("kinds of layers with selected positions", len(kinds), 0, MAX_SELECTIONS)
        num_experts = sum(layer.num_experts for layer in self.layers)
        integer("the number of experts of all layers", num_experts, 0, MAX_EXPERTS)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def num_storing_layers(self) -> int:
        """The number of layers up to the last one that stores something. A row whose outputs nobody
        reads needs no more of them."""
        return max((i + 1 for i, layer in enumerate(self.layers) if layer.stores), default=0)

    @property
    def drafts_blocks_only(self) -> bool:
        """Whether it is a drafter that predicts blocks and no single tokens, which a parallel draft
        model, a whole language model, predicts too."""
        return self.block is not None and self.states is not None

    @property
    def extra_width(self) -> int:
        """Numbers of a hidden state between layers beyond `hidden_size`."""
        return self.hidden_size * (self.num_streams - 1) + self.memory_size

    @property
    def predicts_streams(self) -> bool:
        """Whether the streams are those of Gemma 3n, which layers predict and correct."""
        others = self.hyper is not None or self.residual_block or self.stream_gate_rank
        return self.num_streams > 1 and not others

    @property
    def starts_from_states(self) -> bool:
        """Whether the hidden states of all rows start as the states that they read."""
        return self.states is not None and self.states.joins != "context"

    @property
    def input_size(self) -> int:
        """Numbers of what a row reads in place of a token's embedding, or beside it: an embedding,
        or a state of each stream."""
        return self.hidden_size * (self.num_streams if self.starts_from_states else 1)

    @property
    def starts_at_any_layer(self) -> bool:
        """Whether a pass may begin at any layer, from hidden states of `hidden_size` numbers."""
        is_whole = self.per_layer_size or self.starts_from_states or self.shares_selections
        return not (self.extra_width or is_whole)

    @property
    def starts_at_first_layer(self) -> bool:
        """Whether a row whose input is a hidden state cannot start at a later layer."""
        has_streams = self.num_streams > 1 and not self.predicts_streams
        has_more = self.per_layer_size > 0 or self.memory_size > 0 or has_streams
        return has_more or self.shares_selections

    @cached_property
    def shares_selections(self) -> bool:
        """Whether layers attend to the positions that an earlier layer has selected."""
        shapes = [layer.attention for layer in self.layers if layer.indexer is None]
        return any(shape is not None and shape.top_k is not None for shape in shapes)

    @property
    def attends_to_states(self) -> bool:
        """Whether the first layer's attention reads states beside the tokens' embeddings."""
        return self.states is not None and self.states.joins == "attention"

    @property
    def num_logits(self) -> int:
        """The number of logits per row."""
        return self.head_size or self.vocab_size

    @property
    def cache_shapes(self) -> list[Attention | None]:
        """The attention of each layer that has keys and values of its own, or those of an
        indexer, without other keys."""
        shapes = []
        for layer in self.layers:
            shape = layer.attention
            if layer.cache_layer is not None:
                has_keys = shape is not None and layer.indexer is not None
                shape = replace(shape, num_kv_heads=0) if shape and has_keys else None
            shapes.append(shape)
        return shapes

    @property
    def recurrences(self) -> dict[int, Recurrence]:
        """The recurrence of each layer that has one, or entries, whose inputs are stored too."""
        shapes = {index: layer.stored_inputs for index, layer in enumerate(self.layers)}
        return {index: shape for index, shape in shapes.items() if shape is not None}


def _check_memory(spec: ModelSpec) -> None:
    """One layer with a recurrence makes the memory, before those that read it; or it is a stream of
    side layers, or what the experts of a layer make for the next one."""
    makers = [i for i, layer in enumerate(spec.layers) if layer.memory == "makes"]
    readers = [i for i, layer in enumerate(spec.layers) if layer.memory == "reads"]
    if any(layer.memory in ("shortcut", "adds") for layer in spec.layers):
        kinds = [layer.memory for layer in spec.layers]
        if kinds != ["shortcut", "adds"] * (len(kinds) // 2):
            raise ConfigError("every second layer has a shortcut, and the others add its output")
        if spec.memory_size != spec.hidden_size:
            raise refusal("memory_size", spec.memory_size, f"the {spec.hidden_size} of a shortcut")
        if any(x.attention is None or x.mlp != "gated" or x.is_parallel for x in spec.layers):
            raise ConfigError("layers with shortcuts, and those behind, are attention and an MLP")
    elif any(layer.memory == "side" for layer in spec.layers):
        if spec.memory_size != spec.hidden_size:
            raise refusal("memory_size", spec.memory_size, f"the {spec.hidden_size} of a stream")
        if any(x.attention is None or x.memory in ("makes", "reads") for x in spec.layers):
            raise ConfigError("side layers and those beside them have attention")
    elif any(layer.memory in ("joins", "swaps") for layer in spec.layers):
        if spec.memory_size != spec.hidden_size:
            raise refusal("memory_size", spec.memory_size, f"the {spec.hidden_size} of a state")
        if any(x.attention is None or x.mlp == "none" or x.is_parallel for x in spec.layers):
            raise ConfigError("layers of models with several states are attention and an MLP")
        if any(x.memory not in (None, "joins", "swaps") for x in spec.layers):
            raise ConfigError("layers of models with several states have no other memory")
    elif any(layer.memory == "embeddings" for layer in spec.layers):
        if spec.memory_size != spec.hidden_size:
            raise refusal("memory_size", spec.memory_size, f"the {spec.hidden_size} of embeddings")
        if any(not _may_read_embeddings(layer) for layer in spec.layers):
            raise ConfigError(
                "layers that read the embeddings have attention, a gated MLP and a recurrence"
            )
    elif any(layer.memory == "routes" for layer in spec.layers):
        if any(x.memory != "routes" or not x.num_experts or x.is_parallel for x in spec.layers):
            raise ConfigError("all layers have experts whose routers have states, or none has")
        if any(x.attention is None for x in spec.layers):
            raise ConfigError("layers whose routers have states have attention")
    elif len(makers) != (spec.memory_size > 0) or any(reader < makers[0] for reader in readers):
        raise ConfigError("memory units need one layer before them that makes the memory")
    for layer in (spec.layers[i] for i in readers):
        if layer.attention is not None or layer.recurrence is not None:
            raise ConfigError("a memory unit takes the place of attention and recurrence")
    for layer in (spec.layers[i] for i in makers):
        size = 0 if layer.recurrence is None else layer.recurrence.shape.width_out
        has_norm = layer.recurrence is not None and layer.recurrence.norm is not None
        if layer.attention is not None or size != spec.memory_size or has_norm:
            raise refusal("memory_size", spec.memory_size, f"the {size} outputs of a recurrence")
    if spec.memory_size and (spec.num_streams > 1 or any(x.norms != "pre" for x in spec.layers)):
        raise ConfigError("a memory needs one stream of hidden states, normed before sublayers")


def _may_read_embeddings(layer: LayerSpec) -> bool:
    """Whether a layer of a model whose memory is the embeddings is a plain one."""
    if layer.memory is None:
        return True
    is_whole = layer.attention is not None and layer.recurrence is not None and layer.mlp == "gated"
    is_plain = layer.latent is None and layer.attention_gate is None and not layer.num_experts
    return layer.memory == "embeddings" and is_whole and is_plain and not layer.is_parallel


def _check_streams(spec: ModelSpec) -> None:
    """Layers with streams are attention and a gated MLP, both normed before and after."""
    for index, layer in enumerate(spec.layers):
        is_plain = (
            layer.attention is not None and layer.recurrence is None and not layer.num_experts
        )
        if not is_plain or layer.norms != "both" or layer.mlp != "gated" or layer.has_scale:
            raise ConfigError(
                f"layer {index}: streams need attention and a gated MLP, normed before and after"
            )
    if not spec.per_layer_size or spec.residual_scale != 1.0 or spec.has_position_table:
        raise ConfigError("streams need embeddings of tokens in every layer")


def _check_hyper(spec: ModelSpec, hyper: HyperSpec) -> None:
    """Layers with hyper-connections are two sublayers, normed before."""
    integer("the number of streams", spec.num_streams, 2, MAX_STREAMS)
    integer("hc_sinkhorn_iters", hyper.iterations, 1, MAX_COUNT)
    number("hc_eps", hyper.eps, 0.0, 1.0)
    if hyper.magnitude is not None:
        number("hc_magnitude", hyper.magnitude)
    _check_sublayers(spec, "hyper-connections")


def _check_residual_blocks(spec: ModelSpec) -> None:
    """There is a stream for each block of layers, and one more."""
    blocks = -(-len(spec.layers) // integer("attn_res_block_size", spec.residual_block))
    if spec.num_streams != blocks + 1:
        raise refusal("the number of streams", spec.num_streams, f"{blocks + 1}")
    _check_sublayers(spec, "sums of blocks of layers")


def _check_stream_gates(spec: ModelSpec) -> None:
    """Layers are two sublayers without norms, or embeddings of n-grams; one of the former ends the
    model."""
    integer("hc_count", spec.num_streams, 2, MAX_STREAMS)
    integer("hc_lowrank", spec.stream_gate_rank, 1, MAX_COUNT)
    _check_sublayers(spec, "gates of streams", "none")
    if spec.layers[-1].has_ngrams or spec.has_final_norm:
        raise ConfigError("gates of streams follow the last layer, without another norm")
    if spec.vocab_size > 1 << 24:
        raise refusal(
            "vocab_size", spec.vocab_size, f"at most {1 << 24} with embeddings of n-grams"
        )


def _check_sublayers(spec: ModelSpec, name: str, norms: str = "pre") -> None:
    """The layers of a model with streams are two sublayers with these norms, or n-grams alone."""
    for index, layer in enumerate(spec.layers):
        if layer.has_ngrams:
            _check_ngrams(f"layer {index}: ", spec, layer)
            continue
        is_plain = layer.has_mixer and layer.memory is None and not layer.has_scale
        if not is_plain or layer.norms != norms or layer.mlp == "none" or layer.is_parallel:
            raise ConfigError(f"layer {index}: {name} need two sublayers, both normed alike")
    others = (spec.per_layer_size, spec.memory_size, spec.has_position_table)
    if any(others) or spec.residual_scale != 1.0:
        raise ConfigError(f"{name} are without other embeddings, memories and scales")


def _check_ngrams(prefix: str, spec: ModelSpec, layer: LayerSpec) -> None:
    """The convolution has the streams and one channel more."""
    width = spec.num_streams * spec.hidden_size + 1
    if layer.attention is not None or layer.mlp != "none" or layer.recurrence is None:
        raise ConfigError(f"{prefix}embeddings of n-grams have a convolution alone")
    if layer.recurrence.shape.rule != "conv" or layer.recurrence.shape.width != width:
        raise refusal(f"{prefix}conv width", layer.recurrence.shape.width, f"{width}")


def _check_states(states: StateSpec, hidden_size: int) -> None:
    integer("target_size", states.target_size)
    for tap in states.taps:
        integer("a tapped layer", tap, 0, MAX_LAYERS)
    kinds = ("projection", "cells", "attention", "context", "cross")
    if states.joins not in kinds:
        raise refusal("joins", states.joins, f"one of {kinds}")
    integer("the number of heads", states.num_heads, 0, MAX_STEPS)
    integer("stride", states.stride, 1, MAX_COUNT)
    integer("delay", states.delay, 0, MAX_MODULES - 1)
    has_own_size = states.is_projected or states.num_heads > 0
    if not has_own_size and states.num_taps * states.target_size != hidden_size:
        allowed = f"{hidden_size} numbers per position where they are not projected"
        raise refusal("the target's states", states.num_taps * states.target_size, allowed)
    if states.num_target_norms not in (0, 1, states.num_taps):
        allowed = f"0, 1 or {states.num_taps}"
        raise refusal(
            "the number of norms of the target's states", states.num_target_norms, allowed
        )
    if states.has_normed_residual and not (states.has_norms and states.joins == "attention"):
        raise ConfigError("a normed residual needs norms, and states that the attention reads")


def _check_layer(prefix: str, layer: LayerSpec) -> None:
    if layer.attention is not None:
        _check_attention(prefix, layer.attention)
        _check_selected(prefix, layer, layer.attention)
    if layer.recurrence is not None:
        _check_recurrence(prefix, layer.recurrence)
    if layer.shared_key is not None:
        _check_shared_key(prefix, layer, layer.shared_key)
    elif layer.latent is not None or (layer.attention and layer.attention.latent_dim is not None):
        _check_latent(prefix, layer)
    for rope in (layer.rope, layer.query_rope):
        if rope is not None:
            head_dim = 0 if layer.attention is None else layer.attention.head_dim
            head_dim -= layer.has_key_bias
            if layer.attention is not None and layer.latent is not None:
                head_dim -= layer.attention.value_dim
            if layer.is_differential:
                head_dim //= 2
            _check_rope(prefix, rope, head_dim)
    choices = {
        "norms": ("pre", "post", "both", "sum", "stream", "none"),
        "qk_norm": (None, "head", "heads", "full", "plain"),
        "mlp": ("gated", "plain", "none"),
        "attention_gate": (None, "sigmoid", "softplus"),
        "memory": (
            *(None, "makes", "reads", "side", "embeddings", "shortcut", "adds"),
            *("joins", "swaps", "routes"),
        ),
    }
    _check_activation(prefix, layer, layer.activation)
    if layer.shared_activation is not None:
        _check_activation(prefix, layer, layer.shared_activation)
        if not layer.num_experts:
            raise ConfigError(f"{prefix}an activation of its own needs an MLP beside experts")
    for name, allowed in choices.items():
        if getattr(layer, name) not in allowed:
            raise refusal(f"{prefix}{name}", getattr(layer, name), f"one of {allowed}")
    if layer.activation == "xielu" and (layer.mlp != "plain" or layer.num_experts):
        raise refusal(f"{prefix}activation", layer.activation, "xielu in plain MLPs only")
    if (layer.sum_factors is not None) != (layer.norms == "stream"):
        raise ConfigError(f"{prefix}norms of the stream need factors of the sums, others have none")
    for factor in layer.sum_factors or ():
        number(f"{prefix}sum_factors", factor, -MAX_FACTOR)
    if layer.has_second_sum and (layer.norms != "sum" or layer.attention is None):
        raise ConfigError(f"{prefix}a second sum needs attention, and norms of sums")
    if layer.norms == "stream" and (layer.mlp == "none" or layer.is_parallel):
        raise ConfigError(f"{prefix}norms of the stream need an MLP behind the first sublayer")
    if layer.gate_cutoff is not None:
        number(f"{prefix}gate_cutoff", layer.gate_cutoff, -MAX_FACTOR)
        if layer.mlp != "gated" or layer.num_experts:
            raise refusal(f"{prefix}gate_cutoff", layer.gate_cutoff, "None without a gated MLP")
    if layer.is_differential:
        shape = layer.attention
        is_plain = layer.query_rope is None and layer.qk_norm is None
        is_plain = is_plain and not layer.interleaved_rope
        if shape is None or layer.latent is not None or not is_plain or layer.attention_gate:
            raise ConfigError(f"{prefix}differential attention has neither norms nor a gate")
        if shape.num_heads % 2 or shape.head_dim % 2:
            raise ConfigError(f"{prefix}differential attention needs an even number of heads")
    elif layer.has_distant_pairs:
        raise ConfigError(f"{prefix}pairs of heads need differential attention")
    if layer.low_rank_query is not None:
        if layer.attention is None or (layer.attention_gate and layer.latent is None):
            raise ConfigError(f"{prefix}low-rank queries need attention without a gate")
        integer(f"{prefix}query_rank", layer.low_rank_query.rank)
        number(f"{prefix}norm_eps of queries", layer.low_rank_query.norm_eps, 0.0, 1.0)
        if layer.low_rank_query.has_raw and (layer.latent is None or not layer.attention_gate):
            raise ConfigError(f"{prefix}queries of raw numbers need latent attention with a gate")
    for name in ("attention_norm_gate", "mlp_norm_gate"):
        size = integer(f"{prefix}{name}", getattr(layer, name), 0, MAX_COUNT)
        if size and layer.norms != "pre":
            raise refusal(f"{prefix}{name}", size, "0 without norms of inputs alone")
    if integer(f"{prefix}bias_reach", layer.bias_reach, 0, MAX_COUNT):
        shape = layer.attention
        if shape is None or shape.slopes is not None or layer.latent is not None:
            raise ConfigError(f"{prefix}biases by distance need attention without linear biases")
    if layer.has_relative_positions:
        shape = layer.attention
        has_others = layer.bias_reach or layer.latent is not None
        if has_others or shape is None or shape.slopes or shape.num_heads != shape.num_kv_heads:
            raise ConfigError(
                f"{prefix}disentangled attention needs a key for each head, and no other biases"
            )
    if layer.query_routing is not None:
        _check_query_routing(prefix, layer, layer.query_routing)
    if layer.qkv_limit is not None:
        number(f"{prefix}qkv_limit", layer.qkv_limit)
    if layer.has_attention_inner_norm:
        if layer.attention is None or layer.latent is not None or layer.recurrence is not None:
            raise ConfigError(f"{prefix}an inner norm needs attention without latents")
    if layer.has_query_scale and (layer.latent is None or layer.query_dim % 2):
        raise ConfigError(f"{prefix}factors of queries need latent attention with even queries")
    if layer.has_head_norm and (layer.attention is None or layer.latent or layer.shared_key):
        raise ConfigError(f"{prefix}norms of heads need attention without latents")
    has_norms = layer.norms in ("pre", "both")
    has_memory = layer.memory not in (None, "routes")
    if layer.has_residual_gates and (not has_norms or layer.is_parallel or has_memory):
        raise ConfigError(f"{prefix}residual gates need sublayers whose inputs are normed")
    if layer.has_key_bias:
        _check_key_bias(prefix, layer)
    if layer.is_convolved:
        _check_convolved(prefix, layer)
    if layer.has_mlp_inner_norm and (layer.mlp != "gated" or layer.num_experts):
        raise ConfigError(f"{prefix}an inner norm needs a gated MLP without experts")
    integer(f"{prefix}num_experts", layer.num_experts, 0, MAX_EXPERTS)
    _check_routing(prefix, layer)


def _check_activation(prefix: str, layer: LayerSpec, activation: Activation) -> None:
    allowed = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu")
    if layer.mlp != "gated" or isinstance(activation, str):
        if activation not in allowed:
            raise refusal(f"{prefix}activation", activation, f"one of {allowed}")
        return
    if isinstance(activation, SituGlu):
        number(f"{prefix}activation_situ_beta", activation.cap)
        if activation.up_cap is not None:
            number(f"{prefix}activation_situ_linear_beta", activation.up_cap)
        return
    if isinstance(activation, ClampedSwiglu):
        number(f"{prefix}swiglu_alpha", activation.alpha)
    number(f"{prefix}swiglu_limit", activation.limit)


def _check_cache_layer(prefix: str, layers: tuple[LayerSpec, ...], index: int) -> None:
    layer = layers[index]
    if layer.cache_layer is None:
        return
    integer(f"{prefix}cache_layer", layer.cache_layer, 0, index - 1)
    own, source = layer.attention, layers[layer.cache_layer]
    is_source = source.attention is not None and source.cache_layer is None
    if own is None or not is_source or (layer.latent is None) != (source.latent is None):
        allowed = "an earlier layer with keys and values of its own, for a layer with attention"
        raise refusal(f"{prefix}cache_layer", layer.cache_layer, allowed)
    assert source.attention is not None
    for name in ("num_kv_heads", "head_dim", "latent_dim"):
        if getattr(own, name) != getattr(source.attention, name):
            allowed = f"{getattr(source.attention, name)}, as in layer {layer.cache_layer}"
            raise refusal(f"{prefix}{name}", getattr(own, name), allowed)


def _check_selection(prefix: str, layers: tuple[LayerSpec, ...], index: int) -> None:
    """The layers with a `top_k` have the same one and as many selections, and the first of them has
    an indexer."""
    shapes = [layer.attention for layer in layers[: index + 1] if layer.attention is not None]
    selecting = [shape for shape in shapes if shape.top_k is not None]
    if not selecting or layers[index].attention is not selecting[-1]:
        return
    for name in ("top_k", "num_selections"):
        own, first = getattr(selecting[-1], name), getattr(selecting[0], name)
        if own != first:
            raise refusal(f"{prefix}{name}", own, f"{first}, as in earlier layers")
    if all(layer.indexer is None for layer in layers[: index + 1]):
        raise ConfigError(f"{prefix}there is no indexer in this layer or an earlier one")


def _check_routing(prefix: str, layer: LayerSpec) -> None:
    routing, count = layer.routing, layer.num_experts
    if (routing is None) != (count == 0):
        raise refusal(f"{prefix}num_experts", count, "0 without routing, and more than 0 with it")
    if routing is None:
        if layer.experts_read_inputs or layer.adjugate is not None:
            raise ConfigError(f"{prefix}there are no experts")
        return
    if layer.adjugate is not None:
        _check_adjugate(prefix, count, routing, layer.adjugate)
    used = integer(f"{prefix}experts_per_token", routing.experts_per_token, 1, count)
    if routing.scoring not in ("softmax", "sigmoid", "sqrtsoftplus", "given", "sparsemixer"):
        allowed = "softmax, sigmoid, sqrtsoftplus, given or sparsemixer"
        raise refusal(f"{prefix}scoring", routing.scoring, allowed)
    if routing.scoring == "given" and (used != count or routing.scales_inputs):
        raise refusal(f"{prefix}experts_per_token", used, f"{count} with given weights")
    if layer.mlp == "plain" and not isinstance(layer.activation, str):
        raise ConfigError(f"{prefix}plain experts have no clamped SwiGLU")
    integer(f"{prefix}experts that return their input", routing.num_identity, 0, count - 1)
    if routing.num_identity and (routing.scoring == "given" or routing.scales_inputs):
        raise ConfigError(f"{prefix}experts that return their input have weights of outputs")
    if routing.output_eps is not None:
        number(f"{prefix}output_eps", routing.output_eps, 0.0, 1.0)
        if routing.num_identity or routing.scales_inputs:
            raise ConfigError(f"{prefix}outputs of experts are normed with weights of outputs only")
    number(f"{prefix}jitter", routing.jitter, 0.0)
    if routing.block_experts is not None:
        integer(f"{prefix}block_experts", routing.block_experts, used, count)
    number(f"{prefix}scale", routing.scale)
    groups = integer(f"{prefix}num_groups", routing.num_groups, 1, count)
    integer(f"{prefix}scores_per_group", routing.scores_per_group, 1, 2)
    if count % groups or (groups > 1 and count < 2 * groups):
        allowed = f"a divisor of the {count} experts that leaves 2 or more in a group"
        raise refusal(f"{prefix}num_groups", groups, allowed)
    kept = integer(f"{prefix}groups_per_token", routing.groups_per_token, 1, groups)
    if used > kept * (count // groups):
        allowed = f"at most the {kept * (count // groups)} experts of {kept} groups"
        raise refusal(f"{prefix}experts_per_token", used, allowed)


def _check_adjugate(prefix: str, count: int, routing: Routing, adjugate: Routing) -> None:
    size = integer(f"{prefix}experts_per_group", adjugate.logits_per_expert, 1, count)
    if count % size:
        raise refusal(f"{prefix}experts_per_group", size, f"a divisor of the {count} experts")
    number(f"{prefix}the scale of further experts", adjugate.scale)
    if replace(adjugate, scale=routing.scale, logits_per_expert=1) != routing:
        raise ConfigError(f"{prefix}further experts of groups are chosen as the others are")


def _check_attention(prefix: str, shape: Attention) -> None:
    heads = integer(f"{prefix}num_heads", shape.num_heads, 1, MAX_COUNT)
    kv_heads = integer(f"{prefix}num_kv_heads", shape.num_kv_heads, 1, MAX_COUNT)
    if heads % kv_heads:
        raise refusal(f"{prefix}num_kv_heads", kv_heads, f"a divisor of the {heads} heads")
    dim = integer(f"{prefix}head_dim", shape.head_dim, 1, MAX_COUNT)
    integer(f"{prefix}num_heads * head_dim", heads * dim)
    number(f"{prefix}scale", shape.scale)
    if shape.value_size is not None:
        integer(f"{prefix}value_size", shape.value_size, 1, dim)
    if shape.window is not None:
        integer(f"{prefix}window", shape.window)
    if shape.chunk is not None:
        integer(f"{prefix}chunk", shape.chunk)
        if shape.window is not None:
            raise refusal(f"{prefix}window", shape.window, "None with chunks")
    if shape.softcap is not None:
        number(f"{prefix}softcap", shape.softcap)
    if shape.slopes is not None:
        if len(shape.slopes) != heads:
            raise refusal(f"{prefix}the number of slopes", len(shape.slopes), f"{heads}")
        for slope in shape.slopes:
            number(f"{prefix}slope", slope, 0.0)


def _check_convolved(prefix: str, layer: LayerSpec) -> None:
    shape = layer.attention
    if shape is None or shape.value_size is not None or shape.num_kv_heads * shape.head_dim % 2:
        raise ConfigError(f"{prefix}convolved queries need attention with an even size of values")
    others = layer.latent, layer.shared_key, layer.low_rank_query, layer.indexer, layer.qk_norm
    if any(other is not None for other in (*others, layer.cache_layer)) or layer.is_differential:
        raise ConfigError(f"{prefix}convolved queries are those of plain attention without norms")
    if layer.recurrence is not None or layer.interleaved_rope or layer.memory != "routes":
        raise ConfigError(f"{prefix}convolved queries need routers with states, and no recurrence")


def _check_key_bias(prefix: str, layer: LayerSpec) -> None:
    shape = layer.attention
    if shape is None or shape.value_size is None or shape.value_size >= shape.head_dim:
        raise ConfigError(f"{prefix}keys with a bias need attention with smaller values")
    others = layer.latent, layer.shared_key, layer.query_routing, layer.indexer, layer.cache_layer
    if any(other is not None for other in others) or layer.is_differential or shape.softcap:
        raise ConfigError(f"{prefix}keys with a bias are those of plain attention")


def _check_query_routing(prefix: str, layer: LayerSpec, routing: Routing) -> None:
    """Check the experts of a layer's queries."""
    shape, used = layer.attention, integer(f"{prefix}experts_per_token", routing.experts_per_token)
    if shape is None or shape.num_heads != used * shape.num_kv_heads:
        raise ConfigError(f"{prefix}experts of queries need a head of each for every key head")
    others = layer.latent, layer.shared_key, layer.low_rank_query, layer.indexer, layer.qk_norm
    if any(other is not None for other in others) or layer.qkv_limit or layer.is_differential:
        raise ConfigError(f"{prefix}experts of queries have neither norms nor limits")
    if routing != Routing(used, scale=routing.scale, by_logits=True):
        raise ConfigError(f"{prefix}experts of queries are chosen by their logits")


def _check_latent(prefix: str, layer: LayerSpec) -> None:
    latent, shape = layer.latent, layer.attention
    if latent is None or shape is None or shape.latent_dim is None:
        raise ConfigError(f"{prefix}latent attention lacks one of latent, attention and latent_dim")
    heads, rotary = shape.num_heads, shape.head_dim - shape.latent_dim
    if layer.rope is not None:
        rotary = 2 * layer.rope.frequencies.size
    integer(f"{prefix}rotary size", rotary, 0)
    integer(f"{prefix}num_kv_heads", shape.num_kv_heads, 1, 1)
    integer(f"{prefix}latent_dim", shape.latent_dim, 1, MAX_COUNT)
    if shape.head_dim != shape.latent_dim + rotary:
        allowed = f"{shape.latent_dim + rotary}: latent_dim and the rotary size"
        raise refusal(f"{prefix}head_dim", shape.head_dim, allowed)
    integer(f"{prefix}key_dim", latent.key_dim, 1, MAX_COUNT)
    integer(f"{prefix}value_dim", latent.value_dim, 1, MAX_COUNT)
    integer(f"{prefix}num_heads * key_dim", heads * (latent.key_dim + rotary))
    integer(f"{prefix}num_heads * value_dim", heads * latent.value_dim)
    number(f"{prefix}norm_eps", latent.norm_eps, 0.0, 1.0)
    if latent.growth is not None:
        _check_rope(prefix, latent.growth, latent.key_dim)
    reads_query = layer.low_rank_query is not None and layer.low_rank_query.has_raw
    if layer.attention_gate and layer.gates_heads and reads_query:
        raise refusal(f"{prefix}gates_heads", True, "False with a gate of queries of raw numbers")
    names = ("qk_norm", "norm_after_rope", "has_value_norm", "qkv_limit")
    for name in names:
        if getattr(layer, name):
            raise refusal(f"{prefix}{name}", getattr(layer, name), "unset with latent attention")


def _check_shared_key(prefix: str, layer: LayerSpec, spec: SharedKeySpec) -> None:
    shape = layer.attention
    if shape is None or shape.latent_dim != shape.head_dim or layer.low_rank_query is None:
        raise ConfigError(f"{prefix}a shared key needs attention with low-rank queries")
    integer(f"{prefix}num_kv_heads", shape.num_kv_heads, 1, 1)
    integer(f"{prefix}output_rank", spec.output_rank)
    groups = integer(f"{prefix}o_groups", spec.output_groups, 1, shape.num_heads)
    if shape.num_heads % groups:
        raise refusal(f"{prefix}o_groups", groups, f"a divisor of the {shape.num_heads} heads")
    integer(f"{prefix}o_groups * output_rank", groups * spec.output_rank)
    names = ("latent", "attention_gate", "norm_after_rope", "has_value_norm", "qkv_limit")
    if any(getattr(layer, name) for name in names) or layer.qk_norm != "plain" or layer.has_value:
        raise ConfigError(f"{prefix}a shared key has a norm, and neither a gate nor a limit")
    _check_rope(prefix, spec.output_rope, shape.head_dim)
    if shape.entry_size is None:
        if shape.top_k is not None or spec.has_overlap:
            raise ConfigError(f"{prefix}there are no entries to select")
        return
    integer(f"{prefix}entry_size", shape.entry_size, 1, MAX_ENTRY)
    if shape.window is None or spec.entry_rope is None:
        raise ConfigError(f"{prefix}entries lack one of a window and a rotary embedding")
    _check_rope(prefix, spec.entry_rope, shape.head_dim)


def _check_selected(prefix: str, layer: LayerSpec, shape: Attention) -> None:
    """Check attention to selected positions."""
    if shape.top_k is not None:
        integer(f"{prefix}top_k", shape.top_k, 1, MAX_TOKENS)
        size = integer(f"{prefix}index_block", shape.index_block, 1, shape.top_k)
        if shape.top_k % size:
            raise refusal(f"{prefix}top_k", shape.top_k, f"a multiple of the block, {size}")
        integer(f"{prefix}local_blocks", shape.local_blocks, 0, shape.top_k // size)
        if shape.has_block_keys:
            _check_block_keys(prefix, layer, shape)
        count = integer(f"{prefix}num_selections", shape.num_selections, 1, shape.num_kv_heads)
        if shape.num_kv_heads % count:
            allowed = f"a divisor of the {shape.num_kv_heads} key heads"
            raise refusal(f"{prefix}num_selections", count, allowed)
        window = None if layer.shared_key is not None else shape.window
        others = (window, shape.chunk, shape.slopes)
        has_others = any(other is not None for other in others) or layer.is_differential
        has_others = has_others or (layer.cache_layer is not None and shape.latent_dim is None)
        if has_others or layer.bias_reach or layer.has_relative_positions:
            raise ConfigError(
                f"{prefix}attention to selected positions has no window, no biases and keys of its"
                " own"
            )
    if layer.indexer is not None:
        _check_indexer(prefix, layer, layer.indexer, shape)
    elif shape.index_dim is not None:
        raise refusal(f"{prefix}index_dim", shape.index_dim, "None without an indexer")


def _check_block_keys(prefix: str, layer: LayerSpec, shape: Attention) -> None:
    integer(f"{prefix}index_block", shape.index_block, 1, MAX_ENTRY)
    integer(f"{prefix}local_blocks", shape.local_blocks, 0, 0)
    integer(f"{prefix}num_selections", shape.num_selections, 1, 1)
    is_mean = layer.indexer is not None and layer.indexer.key_rope is not None
    if layer.recurrence is not None or layer.shared_key is not None:
        raise ConfigError(f"{prefix}an indexer has keys of blocks in attention alone")
    if layer.indexer is not None and (layer.rope is not None) != is_mean:
        raise ConfigError(f"{prefix}keys of blocks with a rotary embedding are means")


def _check_indexer(prefix: str, layer: LayerSpec, indexer: IndexerSpec, shape: Attention) -> None:
    has_query = layer.low_rank_query is not None or indexer.has_own_query
    if shape.top_k is None or (indexer.has_weights and not has_query):
        raise ConfigError(f"{prefix}an indexer lacks one of top_k and low_rank_query")
    has_sums = indexer.has_weights or indexer.key_rope is not None
    num_selections = 1 if has_sums else indexer.num_heads
    if shape.num_selections != num_selections:
        raise refusal(f"{prefix}num_selections", shape.num_selections, f"{num_selections}")
    integer(f"{prefix}the indexer's heads", indexer.num_heads, 1, MAX_COUNT)
    integer(f"{prefix}the indexer's head_dim", indexer.head_dim, 1, MAX_COUNT)
    integer(f"{prefix}the indexer's heads * head_dim", indexer.num_heads * indexer.head_dim)
    number(f"{prefix}the indexer's norm_eps", indexer.norm_eps, 0.0, 1.0)
    if indexer.head_dim % 8 or shape.index_dim != indexer.head_dim:
        allowed = f"a multiple of 8, and index_dim ({shape.index_dim})"
        raise refusal(f"{prefix}the indexer's head_dim", indexer.head_dim, allowed)
    if shape.latent_dim is None and indexer.head_dim > shape.head_dim:
        allowed = f"at most {shape.head_dim}, the numbers of a head"
        raise refusal(f"{prefix}the indexer's head_dim", indexer.head_dim, allowed)
    if layer.rope is not None:
        _check_rope(prefix, layer.rope, indexer.head_dim)


def _check_recurrence(prefix: str, spec: RecurrentSpec) -> None:
    shape = spec.shape
    if shape.rule not in RULES:
        raise refusal(f"{prefix}rule", shape.rule, f"one of {RULES}")
    integer(f"{prefix}conv width", shape.width)
    integer(f"{prefix}conv size", shape.window, 1, MAX_WINDOW)
    if spec.gate_norm_eps is not None:
        if shape.rule != "selective":
            raise refusal(f"{prefix}gate_norm_eps", spec.gate_norm_eps, f"None with {shape.rule!r}")
        number(f"{prefix}gate_norm_eps", spec.gate_norm_eps, 0.0, 1.0)
    if spec.norm_eps is not None:
        number(f"{prefix}norm_eps", spec.norm_eps, 0.0, 1.0)
    if shape.rule == "conv":
        return
    heads = integer(f"{prefix}num_heads", shape.num_heads, 1, MAX_COUNT)
    groups = integer(f"{prefix}num_groups", shape.num_groups, 1, MAX_COUNT)
    if heads % groups:
        raise refusal(f"{prefix}num_groups", groups, f"a divisor of the {heads} heads")
    dim = integer(f"{prefix}head_dim", shape.head_dim, 1, MAX_COUNT)
    size = integer(f"{prefix}state_size", shape.state_size, 1, MAX_COUNT)
    integer(f"{prefix}num_heads * head_dim * state_size", heads * dim * size)
    integer(f"{prefix}numbers that a slot stores", shape.num_inputs)
    if shape.rule in TIME_MIX_RULES:
        integer(f"{prefix}state_size", size, dim, dim)
        integer(f"{prefix}num_groups", groups, 1 if shape.rule == "gla" else heads, heads)
        number(f"{prefix}norm_eps", shape.norm_eps, 0.0, MAX_FACTOR)
        return
    if shape.rule == "lru":
        integer(f"{prefix}state_size", size, 1, 1)
    has_keys = shape.rule not in ("selective", "lru")
    width = heads * dim + (2 * groups * size if has_keys else 0)
    if shape.width != width:
        raise refusal(f"{prefix}conv width", shape.width, f"{width}")
    if heads * dim % spec.norm_groups:
        raise refusal(f"{prefix}norm_groups", spec.norm_groups, f"a divisor of {heads * dim}")


def _check_mixes(prefix: str, spec: ModelSpec, layer: LayerSpec) -> None:
    """The layers of RWKV store the inputs of their two sublayers, or of the first one if the MLP is
    gated (ARWKV), and have the values of the first layer."""
    if layer.recurrence is None or layer.recurrence.shape.rule not in TIME_MIX_RULES:
        return
    shape, first = layer.recurrence.shape, spec.layers[0].recurrence
    width = (1 if layer.mlp == "gated" else 2) * spec.hidden_size  # of the inputs that are mixed
    if shape.width != width or shape.width_out != spec.hidden_size:
        allowed = f"heads of {spec.hidden_size} numbers together, the hidden size"
        raise refusal(f"{prefix}num_heads * head_dim", shape.width_out, allowed)
    if first is None or first.shape != shape:
        raise ConfigError(f"{prefix}its recurrence is not that of the first layer")
    if layer.attention is not None or layer.mlp == "none" or layer.norms != "pre":
        raise ConfigError(f"{prefix}time mixing needs an MLP, and norms before both")


def _check_rope(prefix: str, rope: Rope, head_dim: int) -> None:
    frequencies = rope.frequencies
    size = 2 * frequencies.size
    if frequencies.ndim != 1 or not 2 <= size <= head_dim:
        raise refusal(f"{prefix}rotary size", size, f"an even number from 2 to {head_dim}")
    with np.errstate(over="ignore"):
        is_finite = bool(np.isfinite(frequencies.astype(np.float32)).all())
    if not is_finite:
        raise ConfigError(f"{prefix}rotary frequencies are not all finite")
    number(f"{prefix}rope factor", rope.factor)
    number(f"{prefix}rope growth", rope.growth, 0.0)
    integer(f"{prefix}rope growth_period", rope.growth_period)
    integer(f"{prefix}rope growth_start", rope.growth_start, 0)
    if rope.growth and size != head_dim:
        raise refusal(f"{prefix}rotary size", size, f"{head_dim} where the factor grows")
