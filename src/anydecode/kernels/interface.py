"""The interface of the kernels: the inputs and outputs of a pass, and the abstract class `Backend`.

A pass is a list of *rows*. Each row is one input (a token, an embedding or a hidden state) at one
position. It may store its key and value in a slot of the cache, and it attends to an ordered list
of slots. `Rows` represents trees, blocks, beams, chunks and batches alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

#: An array of a pass: numpy in main memory, or the backend's own array on its device.
Array: TypeAlias = Any

#: Weight formats, by their GGUF names. Block formats have GGUF's byte layout.
FORMATS = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
    "NVFP4", "TQ1_0", "TQ2_0",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
)  # fmt: skip
#: Weight formats that GGUF does not have: PTQ161, and those of bitsandbytes, in similar blocks.
OWN_FORMATS = ("PTQ161", "NF4", "FP4")

#: Attention sums keys in blocks of this many consecutive positions, counted from position 0.
KEY_BLOCK = 32


class Variant:
    """Another way in which rows run through the layers than the layers as they are."""


@dataclass(frozen=True)
class StoredInputs(Variant):
    """Rows that only store the keys and values that each layer makes of their inputs themselves,
    without its norm. They run before the other rows of a pass."""


@dataclass(frozen=True)
class PropagatedStates(Variant):
    """Rows that only store what each layer would store of their hidden states: the keys and values,
    or the inputs of the recurrence, that it makes of the states, its norm included."""


@dataclass(frozen=True)
class ParallelLayers(Variant):
    """Layers run in parallel groups of this size, except the first and the last layer."""

    size: int


@dataclass(frozen=True)
class SkippedParts(Variant):
    """Some sublayers are left out: the first sublayers (attention or recurrence, which then store
    nothing) of the layers `mixers`, and the MLPs of the layers `mlps`."""

    mixers: frozenset[int] = frozenset()
    mlps: frozenset[int] = frozenset()


@dataclass(frozen=True)
class CanvasLayers(Variant):
    """Rows of a block that is being denoised, see `Network.canvas_layers`."""


@dataclass(frozen=True)
class AtTime(Variant):
    """Rows of a canvas at a time of the diffusion, of a model that `ModelSpec.time` describes.
    `value` is what the model's embedding of times receives."""

    value: float


STORE_ONLY, PROPAGATE, CANVAS = StoredInputs(), PropagatedStates(), CanvasLayers()


@dataclass(eq=False)
class Weight:
    """A matrix `[out_features, in_features]` in its stored format.

    `data` is `[out_features, in_features]` in float32, float16 or bfloat16, or uint8
    `[out_features, bytes_per_row]` in GGUF's block layout. `name` is the module's name in the
    Hugging Face layout without `.weight` (`model.layers.3.self_attn.q_proj`), by which adapters
    identify their targets. The values are multiplied by `scale`. `columns` has the scales of the
    inputs of PTQ161 (see `kernels/ptq161.py`); other formats have none. `order` is int32
    `[in_features]` where blocks hold the inputs in another order than theirs (GPTQ's act-order):
    stored column j is that of the input `order[j]`. Products of one matrix and experts read such
    weights; `formats.in_order` has the plain matrix.
    """

    format: str
    out_features: int
    in_features: int
    data: np.ndarray
    name: str = ""
    scale: float = 1.0
    columns: np.ndarray | None = None
    order: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of `data`, `columns` and `order`."""
        parts = (self.data, self.columns, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def free(self) -> None:
        """Free `data`, after an executor has packed its own copy."""
        self.data = np.empty(0, self.data.dtype)


@dataclass(frozen=True, eq=False)
class LowRank:
    """A low-rank update of one weight: adds x @ down.T @ up.T * scale (LoRA, Hu et al., 2021).

    Both matrices are float32.
    """

    down: Weight  # [rank, in_features]
    up: Weight  # [out_features, rank]
    scale: float


#: One adapter: name of each target weight -> its update.
Adapter = Mapping[str, LowRank]


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding of the first `2 * len(frequencies)` dimensions of each head.

    Dimension i is rotated with i + half, the Hugging Face order; loaders permute weights stored in
    the interleaved order. angle = (position + shift) * frequencies[i]; cos and sin are multiplied
    by `factor` and, if `growth` is not 0, by 1 + growth * log(1 + (position + shift +
    growth_start) // growth_period). With `has_last_pairs` the last dimensions of each head are
    rotated instead, 2 * i with 2 * i + 1.
    """

    frequencies: np.ndarray  # float32 [rotary_dim / 2]
    factor: float = 1.0
    growth: float = 0.0
    growth_period: int = 1
    growth_start: int = 0
    shift: int = 0
    has_last_pairs: bool = False


@dataclass(frozen=True)
class Attention:
    """The shape of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a row at position p attends to positions > p - window
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    chunk: int | None = None  # a row at position p attends to positions >= p // chunk * chunk
    # The window also ends at positions < p + window, and linear biases fall on both sides.
    is_two_sided: bool = False
    # Linear biases (ALiBi, arXiv:2108.12409): slopes[h] * (the key's position - the row's position)
    # is added to the scores of head h; if two-sided, minus the distance. None: no biases.
    slopes: tuple[float, ...] | None = None
    # The value of a position is the first so many numbers of its only key, and no values are stored
    # (DeepSeek-V2, arXiv:2405.04434); None: values of head_dim numbers are stored.
    latent_dim: int | None = None
    # Numbers of one head's value, if fewer than head_dim (MiMo-V2); a slot has room for head_dim.
    value_size: int | None = None
    # A row attends to so many of the positions that it sees, those that an indexer has selected
    # last (`Backend.select`; DeepSeek-V3.2, arXiv:2512.02556). None: to all.
    top_k: int | None = None
    # Numbers of the indexer's key, which is stored after the heads' values, and which are no more
    # than those of a head if it has values; None: there is no indexer.
    index_dim: int | None = None
    # Positions are selected in blocks of so many, counted from position 0: `top_k` is a multiple.
    index_block: int = 1
    # So many blocks, up to the one that a row's own position lies in, are always selected.
    local_blocks: int = 0
    # The key heads have so many selections, each for equal parts of them (MiniMax-M3).
    num_selections: int = 1
    # The indexer's keys are those of whole blocks, each stored with the last position of its block.
    # A row selects among the blocks of which it sees all positions, and it always attends to those
    # behind them, beside `top_k` others (GLM-5.3).
    has_block_keys: bool = False
    # Every so many positions have an entry, a second key that is stored with the last of them. A
    # row attends to the entries of positions up to its own, or to the `top_k` of these that an
    # indexer selects by keys that are stored with them, and to the positions of its window
    # (DeepSeek-V4). None: there are no entries.
    entry_size: int | None = None

    @property
    def value_dim(self) -> int:
        """Numbers of one head's value."""
        return self.latent_dim or self.value_size or self.head_dim

    @property
    def num_stored_keys(self) -> int:
        """Keys in a slot, an entry included."""
        return self.num_kv_heads + (self.entry_size is not None)

    @property
    def is_selected(self) -> bool:
        """Whether `Backend.select` says what rows attend to."""
        return self.top_k is not None or self.entry_size is not None

    @property
    def key_positions(self) -> int:
        """The positions that one key of an indexer stands for."""
        return self.entry_size or (self.index_block if self.has_block_keys else 1)

    @property
    def selection_kind(self) -> tuple[int | bool | None, ...]:
        """What layers have in common whose rows attend to the same selected positions."""
        blocks = self.index_block, self.has_block_keys
        return self.top_k, *blocks, self.num_selections, self.entry_size, self.window


@dataclass(frozen=True, eq=False)
class RelativePositions:
    """What disentangled attention (DeBERTa, He et al., arXiv:2006.03654) adds to scores.

    That is the product of the query with the key of a relative position, and that of the key with
    its query, both times the scale.

    `columns` is int64 `[2 * reach + 1]`: the relative position of keys that are -reach to reach
    positions behind the row; those further away have that of the reach. `keys` and `queries` are
    float32 `[num_heads, relative positions, head_dim]`.
    """

    columns: np.ndarray
    keys: np.ndarray
    queries: np.ndarray

    @property
    def reach(self) -> int:
        return len(self.columns) // 2


#: What is added to the scores of attention: biases by distance, or products with positions.
Biases = np.ndarray | RelativePositions

#: The rules of a `Recurrence`.
RULES = (
    *("conv", "ssd", "delta", "selective", "wkv", "lru", "kda", "retention", "pool", "wkv6"),
    *("gla", "mlstm"),
)
#: Those whose channels are the inputs of token shifts, see `Backend.shift`.
TIME_MIX_RULES = ("wkv", "wkv6", "gla")


@dataclass(frozen=True)
class Recurrence:
    """The shape of one layer's causal convolution and recurrence.

    A row's inputs are `width` channels and `num_gates` gates. A depthwise convolution over the last
    `window` positions and an activation come first. With the rule "conv" they are all there is.
    With the others the channels are, in this order, the values `[num_heads, head_dim]`, the keys
    and the queries `[num_groups, state_size]`; consecutive heads share a key and a query, or with
    `has_tiled_keys` every `num_groups`-th head. Each head has a state S `[head_dim, state_size]`,
    zero before the first position, and the row's output is S @ query of the new state:

    - "ssd" (Mamba-2; Dao and Gu, arXiv:2405.21060): S = exp(step * decay) * S + step * value @ key,
      with one gate per head and step = softplus(gate + step_bias), limited to `step_limits`. The
      output has skip * value added.
    - "delta" (gated delta rule; Yang et al., arXiv:2412.06464): S = exp(step * decay) * S, then
      S = S + max_strength * sigmoid(strength) * (value - S @ key) @ key. The gates are the
      strengths of all heads, then those of the steps. Keys and queries are divided by their norms,
      and queries by sqrt(state_size).
    - "kda" (Kimi delta attention; Kimi Team, arXiv:2510.26692): the same with a step per number of
      the key, so that each column of S decays by its own. The gates are the strengths of all heads,
      then the steps, `[num_heads, state_size]`. With `min_exponent`, a column decays by
      exp(min_exponent * sigmoid(-decay * (gate + step_bias))) instead.
    - "retention" (lightning attention; Qin et al., arXiv:2401.04658): S = exp(decay) * S + value @
      key, without gates.
    - "selective" (Mamba; Gu and Dao, arXiv:2312.00752): S = exp(step * decay) * S + step * value @
      key, with a step per channel of each head and a decay per number of the state. The channels
      are the values alone. The gates are the keys, the queries and those of the steps.
    - "wkv" (RWKV-7; Peng et al., arXiv:2503.14456), without a convolution: the channels are the
      inputs of the layer's token shifts, see `Backend.shift`. The gates are receptances, decays,
      keys, values and rates, `[num_heads, head_dim]` each. With rate = sigmoid(rate), removed = the
      key * key_scale, divided by its norm, and added = key * (1 + (rate - 1) * key_rate):
      S = S * exp(-exp(-0.5) * sigmoid(decay)) - (S @ removed) @ (removed * rate) + value @ added.
      The output S @ receptance of a head is normed as by `Backend.layer_norm`, with `norm`,
      `norm_bias` and `norm_eps`, if there are some; then value * sum(receptance * added * bonus)
      is added.
    - "wkv6" (RWKV-6; Peng et al., arXiv:2404.05892), without a convolution either: the gates are
      receptances, decays, keys and values. With the state before the row, the output of a head is
      S @ receptance + value * sum(receptance * key * bonus), normed as above. Then
      S = S * exp(-exp(decay)) + value @ key.
    - "gla" (gated linear attention; Yang et al., arXiv:2312.06635), without a convolution either:
      the gates are receptances and decays `[num_heads, head_dim]`, and keys and values
      `[num_groups, head_dim]`. With factor = exp(-min(exp(decay), 5)): S = S * factor + value @
      (key * (1 - factor)). The output of a head is S @ receptance / sqrt(head_dim).
    - "mlstm" (xLSTM; Beck et al., arXiv:2405.04517), without a convolution: the gates are the input
      gates and the forget gates of all heads. Two further rows of a state are those of a value 1,
      n, and m, a single number. With m' = max(m - softplus(-forget), input): S = exp(m -
      softplus(-forget) - m') * S + exp(input - m') * value @ key, and m = m'. The output is S @
      query / sqrt(state_size), divided by max(|n @ query| / sqrt(state_size), exp(-m)) + norm_eps.
    - "lru" (RG-LRU of Griffin; De et al., arXiv:2402.19427): a state of one number per channel,
      which is the output. The channels are the values alone. The gates are the input gates, then
      the recurrence gates, one of each per channel; `step_bias` is added. With a = exp(decay *
      sigmoid(recurrence gate)): S = a * S + sqrt(1 - a^2) * sigmoid(input gate) * value. At
      position 0 the root is left out.

    With the rule "pool" the inputs are those of `Backend.pool`, without a convolution and a state.
    """

    rule: str
    width: int
    window: int
    activation: str | None = None
    num_heads: int = 0
    head_dim: int = 0
    num_groups: int = 0
    state_size: int = 0
    step_limits: tuple[float, float] = (0.0, math.inf)
    has_tiled_keys: bool = False
    norm_eps: float = 0.0
    max_strength: float = 1.0
    min_exponent: float = 0.0

    @property
    def num_gates(self) -> int:
        """Gates per row."""
        if self.rule == "selective":
            return 2 * self.num_groups * self.state_size + self.num_heads * self.head_dim
        if self.rule == "lru":
            return 2 * self.num_heads * self.head_dim
        if self.rule in ("wkv", "wkv6"):
            return (5 if self.rule == "wkv" else 4) * self.num_heads * self.head_dim
        if self.rule == "gla":
            return 2 * (self.num_heads + self.num_groups) * self.head_dim
        if self.rule == "kda":
            return self.num_heads * (1 + self.state_size)
        per_head = {"ssd": 1, "delta": 2, "mlstm": 2}
        return per_head.get(self.rule, 0) * self.num_heads

    @property
    def num_inputs(self) -> int:
        """Numbers that a slot stores."""
        return self.width + self.num_gates

    @property
    def width_out(self) -> int:
        """Numbers of a row's output."""
        return self.width if self.rule in ("conv", "pool") else self.num_heads * self.head_dim

    @property
    def state_shape(self) -> tuple[int, int, int] | None:
        """The shape of a state; None if there is none."""
        if self.rule in ("conv", "pool"):
            return None
        return self.num_heads, self.head_dim + 2 * (self.rule == "mlstm"), self.state_size


@dataclass(eq=False)
class RecurrenceWeights:
    """The vectors of a recurrence, float32, see `Recurrence`.

    All but the first two are `[num_heads]`, but `step_bias` is `[num_heads * state_size]` with the
    rule "kda". With the rule "selective" they are `[num_heads *
    head_dim]`, and `decay` is `[num_heads * head_dim, state_size]`. With the rule "lru" `decay` is
    `[num_heads * head_dim]`, and `step_bias` `[2 * num_heads * head_dim]`.
    """

    conv: np.ndarray  # [width, window], the oldest position first
    conv_bias: np.ndarray | None = None  # [width]
    decay: np.ndarray | None = None  # negative
    step_bias: np.ndarray | None = None
    skip: np.ndarray | None = None


@dataclass(eq=False)
class WkvWeights:
    """The vectors of a recurrence with one of `TIME_MIX_RULES`, float32 `[num_heads * head_dim]`,
    see `Recurrence`. "wkv6" has a bonus and a norm alone, "gla" none."""

    bonus: np.ndarray | None = None
    norm: np.ndarray | None = None
    norm_bias: np.ndarray | None = None
    key_scale: np.ndarray | None = None
    key_rate: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class NgramHash:
    """Which rows of a table stand for the n-grams that end with a token (Qwen3.8).

    An n-gram is the tokens up to a row's own, but `end_token` in place of those before the text and
    of those before and at the last `end_token` before the row. Its number is the exclusive or of
    the products of the token i positions before with `multipliers[i]`. Each of the orders from 2 to
    `len(multipliers)` has equally many heads; head h has the row number % `sizes[h]` +
    `offsets[h]`.

    Attributes:
        multipliers: int64 `[largest order]`.
        sizes: int64 `[heads]`.
        offsets: int64 `[heads]`.
        end_token: The token.
    """

    multipliers: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray
    end_token: int

    @property
    def order(self) -> int:
        """The largest order."""
        return len(self.multipliers)

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        """The rows of each head, int64 `[n, heads]`.

        Args:
            tokens: int64 `[n, order]`, a row's own token first; negative before the text.
        """
        is_end = (tokens < 0) | (tokens == self.end_token)
        is_end[:, 0] = False
        known = np.where(np.logical_or.accumulate(is_end, 1), self.end_token, tokens)
        numbers = np.bitwise_xor.accumulate(known * self.multipliers, 1)[:, 1:]
        of_heads = np.repeat(numbers, len(self.sizes) // (self.order - 1), 1)
        found: np.ndarray = of_heads % self.sizes + self.offsets
        return found


class ClampedSwiglu(NamedTuple):
    """The activation of gpt-oss: g * sigmoid(alpha * g) * (u + 1).

    g is min(gate, limit), and u is up, clamped to [-limit, limit].
    """

    alpha: float = 1.702
    limit: float = 7.0


class CappedSwiglu(NamedTuple):
    """The activation of some layers of Step-3.5: min(silu(gate), limit) * u, where u is up, clamped
    to [-limit, limit]."""

    limit: float


class LimitedSwiglu(NamedTuple):
    """The activation of DeepSeek-V4: silu(min(gate, limit)) * u, where u is up, clamped to [-limit,
    limit]."""

    limit: float


class SituGlu(NamedTuple):
    """The activation of Kimi K3: cap * tanh(gate / cap) * sigmoid(gate) * u, where u is up, with an
    `up_cap` up_cap * tanh(up / up_cap)."""

    cap: float
    up_cap: float | None = None


class Xielu(NamedTuple):
    """The activation of Apertus (Huang and Schlag, arXiv:2411.13010).

    beta * x, plus positive * x^2 above 0 and negative * (exp(min(x, eps)) - 1 - x) elsewhere. `eps`
    is below 0.
    """

    positive: float
    negative: float
    beta: float = 0.5
    eps: float = -1e-6


#: The function of a gate: "silu", "gelu_tanh", "gelu", "sigmoid", "softplus", "identity", a
#: `ClampedSwiglu`, a `CappedSwiglu`, a `LimitedSwiglu` or a `SituGlu`.
Activation = str | ClampedSwiglu | CappedSwiglu | LimitedSwiglu | SituGlu


@dataclass(frozen=True)
class Routing:
    """How the router's logits choose and weigh the experts of a token.

    The scores are float32 functions of the logits. The `experts_per_token` experts with the largest
    scores are chosen (ties to the lower id), after `ExpertWeights.selection_bias` was added. Their
    weights are the scores without that bias.

    Attributes:
        experts_per_token: The number of experts that are chosen.
        normalise: Whether the weights are divided by their sum.
        scoring: "softmax" over all experts, "sigmoid", "sqrtsoftplus", the square root of softplus
            (DeepSeek-V4), or "given": the router's numbers are the
            weights, and all experts run whose weight is not 0 (BlockFFN). With `normalise`, a given
            weight is divided by `scale` times their sum, plus 1e-5. "sparsemixer" (Phi-3.5-MoE; Liu
            et al., arXiv:2409.12136): experts are chosen by their logits, one after the other, and
            the weight of each is its softmax among those not yet chosen whose logits are at most
            2 * `jitter` below, as a share of the larger magnitude.
        num_groups: The number of equal groups of consecutive experts.
        groups_per_token: The number of groups that experts are chosen from: those with the largest
            sums of their `scores_per_group` largest scores (DeepSeek-V3, arXiv:2412.19437).
        scale: A factor of the weights, after normalisation.
        scores_per_group: 2, or 1 for the largest score alone (DeepSeek-V2).
        scales_inputs: Whether the weights multiply the inputs of experts, not their outputs
            (Llama 4).
        by_logits: Whether experts are chosen by their logits in place of their scores: these are
            equal where sigmoids are rounded to 1, and a selection bias adds to the logits then
            (Llama 4, SmallThinker, Kolibri).
        jitter: Of the scoring "sparsemixer".
        block_experts: If given, the rows of a pass that see the same positions (a block of a
            diffusion model) choose from this number of experts: those with the largest scores of
            any of the rows, after the selection bias was added (LLaDA2.2).
        num_identity: So many experts, the last ones, have no matrices and return their input
            (LongCat-Flash).
        output_eps: The epsilon of an RMS norm of each expert's output, which
            `ExpertWeights.output_factors` multiply before (Muse Spark); None: there is no norm.
        logits_per_expert: The router has so many consecutive logits for each expert, of which
            `experts_per_token` are chosen; its weight is the sum of those chosen (GroveMoE).
    """

    experts_per_token: int
    normalise: bool = True
    scoring: str = "softmax"
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    scores_per_group: int = 2
    scales_inputs: bool = False
    by_logits: bool = False
    jitter: float = 0.0
    block_experts: int | None = None
    num_identity: int = 0
    output_eps: float | None = None
    logits_per_expert: int = 1


@dataclass(eq=False)
class ExpertWeights:
    """The three matrices of each expert's gated MLP, and their biases. Without matrices of gates,
    experts are plain MLPs: down(activation(up(x))).

    Biases are float32 `[out_features]`, one per expert; None for no biases. `selection_bias` is
    float32 `[experts]`, see `Routing`. `factors` is float32 `[experts]`: a factor of each expert's
    weight, after normalisation (Gemma 4). `token_experts` is int32 `[tokens, experts_per_token]`,
    the experts of each token, whatever their scores are (DeepSeek-V4); rows without a token and
    tokens after its end have those of token 0. `output_factors` is float32 `[out_features]`, see
    `Routing.output_eps`.
    """

    gate: list[Weight]
    up: list[Weight]
    down: list[Weight]
    gate_bias: list[np.ndarray] | None = None
    up_bias: list[np.ndarray] | None = None
    down_bias: list[np.ndarray] | None = None
    selection_bias: np.ndarray | None = None
    factors: np.ndarray | None = None
    token_experts: np.ndarray | None = None
    output_factors: np.ndarray | None = None

    @property
    def matrices(self) -> list[Weight]:
        """All gate matrices, then all up matrices, then all down matrices."""
        return [*self.gate, *self.up, *self.down]


@dataclass(eq=False)
class KeyValues:
    """The key-value cache.

    Per layer, keys and values are `[num_slots, num_kv_heads, head_dim]`, or `[num_slots,
    num_kv_heads, bytes]` in a packed format (see `kernels/cache.py`). In main memory each head's
    slots are contiguous. Layers without attention have arrays without entries, as do layers that
    attend to an earlier layer's, and the values of layers whose keys hold them
    (`Attention.latent_dim`). The key of an indexer is one more head of the values.

    Attributes:
        inputs: Per recurrent layer the inputs of its recurrence, float32 `[num_slots, width +
            num_gates]`.
        states: The `StatePool` of `kernels/recurrent.py`, if a recurrence has a state.
    """

    keys: list[Array]
    values: list[Array]
    format: str = ""  # "float32", "float16", "bfloat16", "int8" or "int4"; empty: by the dtype
    inputs: dict[int, Array] = field(default_factory=dict)
    states: Any = None

    def __post_init__(self) -> None:
        if not self.format and self.keys:
            self.format = str(self.keys[0].dtype).removeprefix("torch.")

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[0]

    @property
    def arrays(self) -> list[Array]:
        """Every array with one entry per slot."""
        return [*self.keys, *self.values, *self.inputs.values()]


@dataclass(eq=False)
class Rows:
    """The inputs of one pass. Arrays have length n unless stated otherwise.

    Row r attends, in this order, to the slots `tables[table[r]][:prefix[r]]` (entry i is position
    i; -1 marks a position without a slot, which is skipped) and
    `tails[tail_start[r]:][:tail_length[r]]` (entry i is position prefix[r] + i). A row attends to
    itself only if its own slot is listed. In each layer all rows of a pass store their keys before
    any row reads. A table may be `[num_layers, positions]` where layers use different slots.
    """

    tokens: np.ndarray  # int32; -1 where the row's input is in `inputs`
    positions: np.ndarray  # int32
    slots: np.ndarray  # int32, slot for the row's key and value; -1: not stored
    tables: list[np.ndarray]  # int32 arrays, contiguous
    table: np.ndarray  # int32
    prefix: np.ndarray  # int32
    tails: np.ndarray  # int32, flat
    tail_start: np.ndarray  # int32
    tail_length: np.ndarray  # int32
    start: np.ndarray  # int32, first layer to run
    stop: np.ndarray  # int32, one past the last layer to run
    inputs: Array | None = None  # float32 [n, hidden_size], read where token is -1
    adapters: np.ndarray | None = None  # int32, index of the row's LoRA adapter; -1: none
    variant: np.ndarray | None = None  # int32, indices of `variants`; -1: the layers as they are
    variants: list[Variant] = field(default_factory=list)
    guides: list[Any] | None = None  # of rows whose variant is a `Route`: what it knows of each row

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, index: np.ndarray) -> Rows:
        """The rows of `index`, int `[m]`, over the same tables and tails."""
        fields = {name: getattr(self, name)[index] for name in _PER_ROW}
        for name in ("inputs", "adapters", "variant"):
            values = getattr(self, name)
            fields[name] = None if values is None else values[index]
        guides = None if self.guides is None else [self.guides[row] for row in index]
        return replace(self, **fields, guides=guides)


_PER_ROW = (
    "tokens", "positions", "slots", "table", "prefix", "tail_start", "tail_length", "start", "stop",
)  # fmt: skip


class Truncation(NamedTuple):
    """The tokens that a sampler keeps: `top_k` (0: all), of these `top_p`, and of these `min_p`.

    They apply to the scores logit / `temperature`, float32.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class SampleSpec(NamedTuple):
    """A token that a backend may sample within the pass, from row `row` of the returned logits.

    The token is the argmax of logit * `inverse_temperature` + Gumbel noise of (seed, stream,
    position), or of the logit where `inverse_temperature` is 0. Ties go to the lowest id. With a
    `truncation`, which only some backends take (`NativeExecutor.truncates`), it is the argmax of
    score + noise over the tokens kept, or -1 where the sampler is to decide.
    """

    row: int
    inverse_temperature: float = 0.0
    seed: int = 0
    stream: int = 0
    position: int = 0
    truncation: Truncation | None = None


class CopyText(NamedTuple):
    """A text that drafts are copied from.

    Attributes:
        tokens: Token ids, int32 `[capacity]`; -1 separates texts, and is not copied.
        length: How many of them are the text's.
        position: What follows the match is at this index; `length` if the match ends the text.
        match: Number of tokens before `position` that equal the last ones of the generated text; 0:
            none.
        chances: The probability that the token after a match of n tokens is right, float64
            `[MAX_MATCH + 1]`; longer matches have the last one.
    """

    tokens: np.ndarray
    length: int
    position: int
    match: int
    chances: np.ndarray


class CopyMatch(NamedTuple):
    """The match in a text after a multi-step pass.

    Attributes:
        position, match: As those of `CopyText`.
        outcomes: For each token that a match has predicted, in order, twice the match's length, and
            1 more if the prediction was right.
    """

    position: int
    match: int
    outcomes: list[int]


#: Maximum number of sequences that a multi-step pass drafts for.
MAX_SEQUENCES = 64
#: Maximum number of drafts of all sequences in a pass of several.
MAX_SHARED_DRAFTS = 16
#: Limits of drafts in bursts: tokens per pass, the longest match with a probability of its own, and
#: classes of the probabilities that a drafter gives its tokens, of equal width.
MAX_BURST_DRAFTS, MAX_MATCH, NUM_BINS = 32, 64, 10


@dataclass(eq=False)
class BurstDrafter:
    """A drafter that reads states of the target, and drafts in the steps of a multi-step pass.

    Its row at a position reads the token there and the target's states at the position before. In
    each step it may read the tokens that were accepted since, and then draft a chain: its state of
    one token is its input beside the next. A drafted token is the sample of its logits with the
    noise that the target has for the position. The step may also score a sibling of the first one:
    what that sample would be without it.

    Attributes:
        chains: What the drafter's backend runs (`NativeExecutor.chains`).
        layers: The target's hidden states that it reads, by number of layers.
        cache: Its keys and values.
        table: Its slots by position, int32: of the positions that it has read, and of as many as
            `tokens` and the tokens of the pass.
        first: The first position that it has not read.
        tokens: The text from there on. The pass continues the text.
        states: The target's states before each of these, side by side, float32 `[tokens, layers *
            hidden_size]`.
        chances: The share of right tokens, if those before them are, by depth and by the
            probability that the drafter gives them, float64 `[depths, NUM_BINS]`; greater depths
            have the last ones.
        mean_chances: The means of these over the tokens drafted so far, float64 `[depths]`.
        sibling_chances: The share of right siblings, by twice the probability that the drafter
            gives them, float64 `[NUM_BINS]`; greater ones have the last one. None: no siblings.
        rate: Expected tokens per second of a step with its draft.
        seconds: Expected duration of drafting one token.
        max_drafts: Maximum number of tokens of a chain.
        num_due: The number of steps in which it is to draft, whatever `rate` is.
        num_read: Result: how many tokens, of the text and of the pass, it has read.
        known_states: Result: `states`, and those before the tokens of the pass.
        num_drafted: Result: the tokens that it has drafted in each pass; those that are verified
            are in `BurstDrafts`.
        num_unread: Result: the tokens that it has read in each pass before it drafted.
        draft_seconds: Result: the duration of drafting in each pass.
        siblings: Result: those that it has found in each pass; -1: none.
        sibling_probabilities: Result: those that it gives them.
    """

    chains: Any
    layers: tuple[int, ...]
    cache: KeyValues
    table: np.ndarray
    first: int
    tokens: Sequence[int]
    states: np.ndarray
    chances: np.ndarray
    mean_chances: np.ndarray
    rate: float
    seconds: float
    max_drafts: int
    num_due: int = 0
    sibling_chances: np.ndarray | None = None
    num_read: int = 0
    known_states: np.ndarray | None = None
    num_drafted: list[int] = field(default_factory=list)
    num_unread: list[int] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)
    siblings: list[int] = field(default_factory=list)
    sibling_probabilities: list[float] = field(default_factory=list)


@dataclass(eq=False)
class BurstDrafts:
    """Drafts that a backend may find and verify for a sequence in the steps of a multi-step pass.

    Each step scores the last token and the draft that gives the most expected tokens per second: a
    copy from a text, or the chain of a drafter, maybe with a sibling of its first token, after
    which nothing is drafted. It keeps the draft's tokens that equal the samples. So the tokens are
    those without drafts. Of several sequences, each step has the copies that together give the most
    expected tokens per second.

    Attributes:
        texts: The texts; the first is the one that generation continues, whose array has room for
            the sampled tokens. Longer matches than those given are searched for at first. Empty
            beside other sequences: nothing is drafted for this one.
        costs: Seconds of a pass with 0, 1, ... drafts of all its sequences, float64 `[1 to
            MAX_BURST_DRAFTS + 1]`.
        min_gain: The least gain of drafts over a pass without any, as a factor.
        min_probability: The least probability with which all tokens of a draft are right.
        drafter: A drafter, or None; of a single sequence.
        max_passes: Maximum number of passes; the engine may lower it.
        weight: What a token of the sequence counts for in the expected tokens beside other
            sequences; the engine sets it (`scoring.goodput.token_weights`).
        rows: Result: the sequence's rows in each pass; empty where the backend has not drafted.
        seconds: Result: the duration of each pass.
        drafts: Result: the draft of each pass, without its sibling.
        siblings: Result: the sibling that each pass has scored; None: none.
        sources: Result: the index of the text that it was copied from, or the number of texts if it
            is the drafter's.
        probabilities: Result: those that the drafter gives the tokens of its drafts.
        num_read: Result: how many sampled tokens the texts have been searched for.
        matches: Result: of each text, after these tokens.
        table: Result: the slots by position, int32, if a drafter may have had siblings. Those after
            the last row that was given are in another order, if some were accepted.
    """

    texts: list[CopyText]
    costs: np.ndarray
    min_gain: float
    min_probability: float
    drafter: BurstDrafter | None = None
    max_passes: int = 1
    weight: float = 1.0
    rows: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    siblings: list[int | None] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    probabilities: list[list[float]] = field(default_factory=list)
    num_read: int = 0
    matches: list[CopyMatch] = field(default_factory=list)
    table: np.ndarray | None = None


@dataclass(eq=False)
class OutputSpec:
    """The requested outputs of a pass.

    `logits` lists rows whose logits are returned; the head is applied to the state after each row's
    last layer. `hidden[l]` lists rows whose hidden state after `l` layers is returned (0:
    embeddings). `samples` are optional: a backend may leave them unsampled.

    With `step_limits` there is one sample of each of at most `MAX_SEQUENCES` sequences, of its last
    row, which attends to its table up to itself and has no tail. A backend that samples them may
    continue (multi-step): run a pass over the sampled tokens at the next positions, whose slots are
    in the tables, sample again, and so on. A sequence ends with `step_limits[i]` tokens or with one
    of `end_tokens`, and all of them end where one does. With `min_probabilities` the sequences are
    drafts, of which each ends by itself, also where the product of its tokens' probabilities (at
    temperature 1) is below `min_probabilities[i]`. All end with the present step if the one element
    of `interrupt`, which other threads may set meanwhile, is not 0. With `drafts`, one for each
    sequence, the steps may have drafts, if the first pass is over a single row of each; costs,
    gain, probability and number of passes are those of the first.
    """

    logits: np.ndarray  # int32 row indices
    hidden: dict[int, np.ndarray] = field(default_factory=dict)
    samples: list[SampleSpec] = field(default_factory=list)
    step_limits: list[int] = field(default_factory=list)
    end_tokens: frozenset[int] = frozenset()
    min_probabilities: list[float] = field(default_factory=list)
    drafts: list[BurstDrafts] = field(default_factory=list)
    interrupt: np.ndarray | None = None  # int32 [1]


@dataclass(eq=False)
class Output:
    """The outputs of a pass.

    `logits` is float32 `[len(output_spec.logits), vocab_size]` and `hidden[l]` float32 `[rows,
    hidden_size]`. Both may be views of buffers that the next pass of the same model overwrites.
    `sampled` has the tokens of `output_spec.samples`, -1 where one is left to the sampler, or is
    empty where the backend does not sample. After several steps (`OutputSpec.step_limits`)
    `steps[i]` has all tokens of sequence i in order, from `sampled[i]` up to one that is left to
    the sampler, and `step_probabilities[i]` the probabilities of a draft's; `logits` are those of
    the last pass. Both are empty where the backend has run one step. `num_passes` is the number of
    passes of all steps, with one whose sample is left to the sampler.
    """

    logits: Array
    hidden: dict[int, Array]
    sampled: list[int] = field(default_factory=list)
    num_passes: int = 1
    steps: list[list[int]] = field(default_factory=list)
    step_probabilities: list[list[float]] = field(default_factory=list)


class Backend(ABC):
    """The operations of a decoder-only transformer.

    A value represents a float32 matrix with one row per row of the pass. Weights, biases and norms
    are numpy arrays; a backend on another device copies them once. The values of the reference
    backend are torch tensors, and its methods compute them. The values of a compiling
    backend are symbols, and its methods record operations, so that a range of layers is one call
    later. Every method returns a new value. Every result row depends bitwise on its own inputs
    alone (batch invariance).
    """

    name: str

    @abstractmethod
    def rms_norm(self, x: Any, weight: np.ndarray | None, eps: float, groups: int = 1) -> Any:
        """x / sqrt(mean(x^2) + eps) * weight over each of `groups` equal parts of the last axis.

        `weight` is float32 `[width / groups]` or `[width]`.
        """

    @abstractmethod
    def linear(self, x: Any, weight: Weight, bias: np.ndarray | None = None) -> Any:
        """x @ weight.T + bias, plus the update of each row's adapter that targets `weight.name`."""

    @abstractmethod
    def grouped_linear(self, x: Any, weights: Sequence[Weight]) -> Any:
        """The products of equal parts of the last axis, part i with `weights[i]`, side by side.

        The matrices have the same shape.
        """

    @abstractmethod
    def split(self, x: Any, size: int, groups: int = 1) -> tuple[Any, Any]:
        """The first `size` numbers of each of `groups` equal parts of the last axis, and the others
        of each."""

    @abstractmethod
    def join(self, x: Any, y: Any, groups: int = 1) -> Any:
        """Each of `groups` equal parts of x, followed by that of y: the inverse of `split`."""

    @abstractmethod
    def rope(self, x: Any, num_heads: int, rope: Rope) -> Any:
        """Apply the rotary embedding of the row's position to each of `num_heads` heads."""

    @abstractmethod
    def store(
        self,
        k: Any | None,
        v: Any | None,
        layer: int,
        shape: Attention,
        index_key: Any | None = None,
    ) -> None:
        """Store k, v (None if `shape.latent_dim` is set) and the indexer's key, if there is one, in
        each row's slot of `layer`. With `shape.entry_size`, k is the key and then the entry. Both k
        and v are None in layers that share keys and have an indexer."""

    @abstractmethod
    def select(
        self,
        q: Any | None,
        weights: Any | np.ndarray | None,
        num_heads: int,
        layer: int,
        shape: Attention,
    ) -> None:
        """Select the `shape.top_k` positions that each row attends to in `layer`, and in later
        layers whose shape has a `top_k`.

        The score of a position is the sum over the indexer's heads of weight * max(q @ key, 0).
        Without weights, each head selects for its part of the key heads, by q @ key. The score of a
        block of positions (`shape.index_block`) is the largest one of them, or with
        `shape.has_block_keys` that of its own key; those of the last `shape.local_blocks` are
        infinite. The positions of the blocks with the largest scores are selected, of equal ones
        the lower. A row that sees no more than `top_k` positions, or whole blocks with keys of as
        many, attends to all. With `shape.entry_size` entries are selected, not positions; the
        indexer's key of an entry is stored with its last position.

        Args:
            q: The indexer's queries, `num_heads` of `shape.index_dim` numbers; None: the positions
                are those that an earlier layer has selected, or without `shape.top_k` all entries.
            weights: One number per head, or float32 `[num_heads]` for all rows; None: there are
                `shape.num_selections` heads.
            num_heads: Heads of the indexer.
            layer: Whose slots have the indexer's keys.
            shape: The shape of the layer's attention.
        """

    @abstractmethod
    def attend(
        self,
        q: Any,
        layer: int,
        shape: Attention,
        sinks: np.ndarray | None = None,
        biases: Biases | None = None,
    ) -> Any:
        """Attention over `Rows`, to the keys and values that are stored in `layer`. With
        `shape.top_k` it follows `select`.

        That may be an earlier layer, whose keys and values several layers share. The result has
        `shape.value_dim` numbers per head. `sinks` is float32 `[num_heads]`: the score of a key of
        each head that every row attends to and whose value is zero (gpt-oss). `biases` is float32
        `[num_heads, 2 * reach + 1]`: what is added to the scores of keys that are -reach to reach
        positions behind the row; of those further away, that of the reach (MPNet). They may be
        `RelativePositions` instead, in layers with as many heads of keys as of queries.
        """

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: int,
        shape: Attention,
        sinks: np.ndarray | None = None,
        biases: Biases | None = None,
    ) -> Any:
        """`store` and then `attend`, in the same layer."""
        self.store(k, v, layer, shape)
        return self.attend(q, layer, shape, sinks, biases)

    @abstractmethod
    def convolution(self, x: Any, layer: int, shape: Recurrence, weights: RecurrenceWeights) -> Any:
        """Store x in each row's slot of `layer`, then compute the convolution and its activation.

        Each row must see all earlier positions and itself.
        """

    @abstractmethod
    def recurrence(
        self,
        x: Any,
        gates: Sequence[Any],
        layer: int,
        shape: Recurrence,
        weights: RecurrenceWeights | WkvWeights,
    ) -> Any:
        """Store x and gates in each row's slot of `layer`, then compute the recurrence.

        `x` is None if `convolution` or `shift` has stored it. `gates` has the parts of a row's
        gates in their order. Each row must see all earlier positions and itself.
        """

    @abstractmethod
    def shift(
        self, x: Any, layer: int, shape: Recurrence, first: int, mixes: Sequence[np.ndarray]
    ) -> list[Any]:
        """Store x in each row's slot of `layer`, from number `first` on, then compute x + (y - x) *
        mix for each of `mixes`, float32 `[width]`, where y is the x of the position before, and
        zero before the first (token shift).

        Each row must see all earlier positions and itself.
        """

    @abstractmethod
    def stored(self, layer: int, shape: Recurrence, first: int, size: int) -> Any:
        """The `size` numbers from `first` on that each row's slot of an earlier layer stores."""

    @abstractmethod
    def ngram_rows(
        self, table: Weight, layer: int, shape: Recurrence, first: int, hashes: NgramHash
    ) -> Any:
        """Store each row's token in its slot of `layer`, as number `first`, then return the rows of
        `table` that stand for the n-grams which end with it, side by side.

        Rows without a token have `hashes.end_token`. Each row must see all earlier positions and
        itself.
        """

    @abstractmethod
    def pool(
        self, x: Any, layer: int, shape: Recurrence, first: int, bias: np.ndarray | None
    ) -> Any:
        """Store x in each row's slot of `layer`, from number `first` on, then compute the entry of
        the last positions up to that of each row (DeepSeek-V4).

        x has `groups` values, and then as many gates. The entry of `len(bias)` positions is the sum
        of their last values and, with two groups, of the first values of as many positions before,
        if these exist. Their weights are the softmax of each number's gates plus `bias`, float32
        `[positions, groups, numbers]`. Without a bias, x has values of one group alone, and the
        entry of `shape.window` positions is their mean. Rows whose position is not the last one of
        an entry have zeros. Each row must see all earlier positions and itself.
        """

    @abstractmethod
    def hyper_factors(self, x: Any, streams: int, iterations: int, eps: float) -> Any:
        """The factors of manifold-constrained hyper-connections (mHC, Xie et al., 2026).

        Of a row of x the first `streams` numbers give sigmoid(x) + eps, by which a sublayer's input
        is collapsed. If there are more, as many others give 2 * sigmoid(x), by which its output is
        spread, and the remaining `streams` rows of as many numbers a matrix: their softmax plus
        eps, whose columns, rows, columns and so on are divided by their sums plus eps, `iterations`
        times the columns. The result has its transpose minus the identity, the coefficients of
        `mix`.
        """

    @abstractmethod
    def softmax(self, x: Any) -> Any:
        """The softmax of each row of x."""

    @abstractmethod
    def collapse(self, x: Any, factors: Any, groups: int) -> Any:
        """The sum of `groups` equal parts of x, times `factors`, `groups` numbers per row of x."""

    @abstractmethod
    def gated(self, gate: Any, up: Any, activation: Activation) -> Any:
        """activation(gate) * up, or the function of both that a class of `Activation` states."""

    @abstractmethod
    def add(self, x: Any, y: Any) -> Any:
        """x + y"""

    @abstractmethod
    def scale(self, x: Any, factor: float) -> Any:
        """x * factor"""

    @abstractmethod
    def softcap(self, x: Any, cap: float) -> Any:
        """cap * tanh(x / cap)"""

    @abstractmethod
    def clamp(self, x: Any, limit: float) -> Any:
        """x, limited to [-limit, limit]"""

    @abstractmethod
    def multiply(self, x: Any, factors: np.ndarray) -> Any:
        """x * factors, float32 `[width]`"""

    @abstractmethod
    def cut_off(self, x: Any, multiplier: float) -> Any:
        """max(x - c, 0), where c is the mean of a row of x plus `multiplier` times its standard
        deviation."""

    @abstractmethod
    def match_magnitude(self, x: Any, like: Any) -> Any:
        """x * sqrt(mean(like^2)) / sqrt(max(mean(x^2), 1e-5)) over the last axis."""

    @abstractmethod
    def mix(self, x: Any, coefficients: Any, groups: int) -> Any:
        """Each of `groups` equal parts of x plus a weighted sum of all of them.

        `coefficients` has `groups` numbers per part, and a row per row of x.
        """

    @abstractmethod
    def block_convolution(self, x: Any, kernels: Any, base: np.ndarray, mask_token: int) -> Any:
        """A causal convolution within blocks of rows, of which only the first row has another token
        than `mask_token`: the sum over t of the x of the row t before in the block, times
        `base[t]`, float32 `[taps, width]`, plus the number t of each group in `kernels`.

        `kernels` has `taps` times `groups` numbers per row, for as many equal parts of a row of x.
        """

    @abstractmethod
    def spread(self, x: Any, factors: Any, groups: int) -> Any:
        """`groups` multiples of x side by side.

        `factors` has `groups` numbers per row of x, or is float32 `[groups]`.
        """

    @abstractmethod
    def experts(
        self,
        x: Any,
        router: Any,
        weights: ExpertWeights,
        routing: Routing,
        activation: Activation,
    ) -> Any:
        """Mixture of experts: the weighted sum of the chosen experts' outputs, in order of id.

        `router` holds the logits of experts, or their weights if the scoring is "given". Only the
        matrices of experts that some row has are read.
        """

    @abstractmethod
    def expert_products(
        self, x: Any, router: Any, matrices: Sequence[Weight], routing: Routing, groups: int
    ) -> Any:
        """The products of x with the matrices of the experts that each row chooses, in order of id:
        the first of `groups` equal parts of each product, then the second ones, and so on.

        `router` holds one logit per expert. Experts are chosen by logits.
        """

    @abstractmethod
    def expert_sums(
        self, x: Any, router: Any, matrices: Sequence[Weight], routing: Routing, groups: int
    ) -> Any:
        """The weighted sum of the products of the chosen experts' matrices, each with its own part
        of x, which is laid out as the result of `expert_products`."""

    @abstractmethod
    def layer_norm(
        self, x: Any, weight: np.ndarray, bias: np.ndarray | None, eps: float, groups: int = 1
    ) -> Any:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, with the mean and the variance
        of each of `groups` equal parts of a row.

        `weight` and `bias` are float32 `[width]`.
        """

    @abstractmethod
    def activate(self, x: Any, activation: str | Xielu) -> Any:
        """activation(x); a name is one of those that `gated` takes, "relu", "relu2", "exp" or
        "signed_root", the square root of the magnitude, at least 1e-6, with the sign of x."""

    @abstractmethod
    def add_positions(self, x: Any, table: Weight) -> Any:
        """x plus the row of `table` of each row's position.

        Positions after the table's end, which drafts may have, take its last row.
        """

    @abstractmethod
    def columns(self, x: Any, first: int, size: int) -> Any:
        """The numbers of x from `first` on, `size` of each row."""

    @abstractmethod
    def token_rows(self, table: Weight, factor: float, *, has_inputs: bool = False) -> Any:
        """`factor` times the row of `table` of each row's token, whatever layers run.

        Rows without a token take `Rows.inputs` instead if `has_inputs`, else row 0 of the table, as
        do tokens after its end.
        """

    @abstractmethod
    def shared(self, key: Any, compute: Callable[[], Any]) -> Any:
        """The value that `compute` returns, computed once for all layers of a call.

        It must not depend on hidden states. `key` identifies it.
        """

    @abstractmethod
    def gate_parts(self, x: Any, gate: Any, activation: str) -> Any:
        """Each of equal parts of x times activation(gate), "sigmoid" or "softplus", where `gate`
        has one number per part."""
