"""What a backend computes and what it is given. Plain data and one abstract class.

A pass is a list of *rows*. Each row is one input (a token, an embedding or a hidden state) at one
position; it may store its key and value in one slot of the cache, and it sees an ordered list of
slots. Everything a kernel must know of trees, blocks, beams, chunks and batches is in `Rows`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

#: Weight formats, by their GGUF names. Block formats keep GGUF's bytes.
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

#: Keys are summed in blocks of this many consecutive positions, counted from position 0.
KEY_BLOCK = 32


@dataclass(eq=False)
class Weight:
    """A matrix `[out_features, in_features]` in the format it is stored in.

    `data` is `[out_features, in_features]` in float32, float16 or bfloat16, or uint8
    `[out_features, bytes_per_row]` in GGUF's block layout. `name` is the module's name in the
    Hugging Face layout without `.weight` (`model.layers.3.self_attn.q_proj`): adapters find their
    targets by it.
    """

    format: str
    out_features: int
    in_features: int
    data: torch.Tensor
    name: str = ""

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to one weight: x @ down.T @ up.T * scale, both matrices float32."""

    down: Weight  # [rank, in_features]
    up: Weight  # [out_features, rank]
    scale: float


#: One adapter: the name of each weight it targets, and what it adds there.
Adapter = Mapping[str, LowRank]


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding of the first `2 * len(frequencies)` dimensions of each head.

    Pairs are (i, i + half), the Hugging Face order; loaders permute weights stored in the
    interleaved order. angle = position * frequencies[i]; cos and sin are times `factor`.
    """

    frequencies: torch.Tensor  # float32 [rotary_dim / 2]
    factor: float = 1.0


@dataclass(frozen=True)
class Attention:
    """The shape of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a row at position p sees keys at positions > p - window
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)


@dataclass(eq=False)
class KeyValues:
    """The cache: per layer, keys and values `[num_slots, num_kv_heads, head_dim]`, or
    `[num_slots, num_kv_heads, bytes]` where `format` packs them (`kernels/cache.py`). In main
    memory a head's slots stand together."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    format: str = ""  # "float32", "float16", "bfloat16", "int8" or "int4"; by dtype where empty

    def __post_init__(self) -> None:
        if not self.format and self.keys:
            self.format = str(self.keys[0].dtype).removeprefix("torch.")

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[0]


@dataclass(eq=False)
class Rows:
    """The inputs of one pass, all of length n unless said otherwise.

    Row r sees, in this order, the slots `tables[table[r]][:prefix[r]]` (entry i is the key at
    position i; -1 is a hole, skipped) and then `tails[tail_start[r]:][:tail_length[r]]` (entry i is
    the key at position prefix[r] + i). A row that is to see itself finds its own slot there. All
    rows of a pass store their keys before any row of that pass reads, layer by layer.
    A table may be `[num_layers, positions]` where layers keep different slots.
    """

    tokens: np.ndarray  # int32; -1 where the row's input is in `inputs`
    positions: np.ndarray  # int32
    slots: np.ndarray  # int32, where the row stores its key and value; -1: nowhere
    tables: list[np.ndarray]  # int32 arrays, contiguous
    table: np.ndarray  # int32
    prefix: np.ndarray  # int32
    tails: np.ndarray  # int32, flat
    tail_start: np.ndarray  # int32
    tail_length: np.ndarray  # int32
    start: np.ndarray  # int32, first layer to run
    stop: np.ndarray  # int32, one past the last layer to run
    inputs: torch.Tensor | None = None  # float32 [n, hidden_size], read where token is -1
    adapters: np.ndarray | None = None  # int32, index of the row's LoRA adapter; -1: none
    parallel: np.ndarray | None = None  # int32, see `Network.grouped`; 0: layer after layer

    def __len__(self) -> int:
        return len(self.tokens)


class SampleSpec(NamedTuple):
    """A token that a backend may pick within the pass from row `row` of the logits it gives back:
    the argmax of logit * `inverse_temperature` + noise of (seed, stream, position), or of the logit
    where `inverse_temperature` is 0; ties to the lowest id."""

    row: int
    inverse_temperature: float = 0.0
    seed: int = 0
    stream: int = 0
    position: int = 0


@dataclass(eq=False)
class OutputSpec:
    """What a pass gives back: logits of some rows (through the head from where each row stops) and
    hidden states: `hidden[l]` lists rows whose state after `l` layers is wanted (0: embeddings).
    `choices` may be made or left.

    Where `said` is more than 1 there is one choice, of the last row, which sees its table up to
    itself and no tail. A backend that makes it may go on: score the chosen token at the position
    behind, whose slot the table names, choose again, and so on until it has chosen `said` tokens or
    one of `ends`.
    """

    logits: np.ndarray  # int32 row indices
    hidden: dict[int, np.ndarray] = field(default_factory=dict)
    samples: list[SampleSpec] = field(default_factory=list)
    num_steps: int = 1
    end_tokens: frozenset[int] = frozenset()


@dataclass(eq=False)
class Output:
    """`logits` float32 `[len(want.logits), vocab_size]`; `hidden[l]` float32 `[rows, hidden_size]`.

    Both may be views of buffers that the next pass of the same model overwrites. `picks` are the
    tokens of `output_spec.samples`, or none where the backend leaves them; where it went on, all
    tokens that it chose, one after the other, and `logits` are those that the last was chosen
    from."""

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]
    sampled: list[int] = field(default_factory=list)


class Backend(ABC):
    """The operations a decoder-only transformer is written in.

    A value stands for a float32 matrix with one row per row of the pass. The reference backend's
    values are torch tensors and its methods compute; a compiling backend's values are symbols and
    its methods record, so that a whole layer range is one call later. Every method returns a new
    value. Every result row depends on its own inputs alone, bitwise (batch invariance).
    """

    name: str

    @abstractmethod
    def rms_norm(self, x: Any, weight: torch.Tensor | None, eps: float, groups: int = 1) -> Any:
        """x / sqrt(mean(x^2) + eps) * weight over each of `groups` equal parts of the last axis;
        `weight` is float32 `[width / groups]`, or `[width]`."""

    @abstractmethod
    def linear(self, x: Any, weight: Weight, bias: torch.Tensor | None = None) -> Any:
        """x @ weight.T + bias, plus each row's adapter where one targets `weight.name`."""

    @abstractmethod
    def rope(self, x: Any, num_heads: int, rope: Rope) -> Any:
        """Rotate each of `num_heads` heads by its row's position."""

    @abstractmethod
    def attention(self, q: Any, k: Any, v: Any, layer: int, shape: Attention) -> Any:
        """Store k and v in `layer` at each row's slot, then attend from q as `Rows` says."""

    @abstractmethod
    def gated(self, gate: Any, up: Any, activation: str) -> Any:
        """activation(gate) * up; `activation` is "silu" or "gelu_tanh"."""

    @abstractmethod
    def add(self, x: Any, y: Any) -> Any: ...

    @abstractmethod
    def scale(self, x: Any, factor: float) -> Any: ...

    @abstractmethod
    def softcap(self, x: Any, cap: float) -> Any:
        """cap * tanh(x / cap)"""

    @abstractmethod
    def experts(
        self,
        x: Any,
        router: Any,
        gate: list[Weight],
        up: list[Weight],
        down: list[Weight],
        top_k: int,
        normalise: bool,
        activation: str,
    ) -> Any:
        """Mixture of experts. `router` holds one logit per expert. Softmax in float32 over all
        experts, the `top_k` largest (ties to the lower id), renormalised if `normalise`, summed in
        the order of expert id."""
