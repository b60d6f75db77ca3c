"""The shape of a decoder-only transformer: everything in which the supported families differ."""

from __future__ import annotations

from dataclasses import dataclass

from anydecode.kernels.interface import Attention, Rope


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """One layer. `norms` tells where RMS norms stand: "pre" (most), "post" (OLMo 2: on the output
    of each sublayer only), "both" (Gemma 2 and 3)."""

    attention: Attention
    rope: Rope | None  # None: no position embedding in this layer (SmolLM3)
    norms: str = "pre"
    qk_norm: str | None = None  # None, "head" (Qwen3, Gemma 3) or "full" (OLMo 2)
    activation: str = "silu"
    num_experts: int = 0
    experts_per_token: int = 0
    normalise_experts: bool = True


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A whole model. Norm weights that a family stores as an offset from one are folded at load."""

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
    block_size: int | None = None  # positions see their own block of this size and those before

    @property
    def num_layers(self) -> int:
        return len(self.layers)
