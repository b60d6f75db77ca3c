"""BlockFFN: MLPs divided into blocks, of which each token uses few (Song et al., "BlockFFN: Towards
End-Side Acceleration-Friendly Mixture-of-Experts with Chunk-Level Activation Sparsity",
arXiv:2507.08771).

A router gives each block a weight, relu(router(x)), normed. Blocks of weight 0 are not run: any
number of them. Training makes consecutive tokens use the same ones, so that a pass over a draft
reads few blocks too. The models have multi-head latent attention and the factors of MiniCPM.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.kernels.formats import plain_weight
from anydecode.kernels.interface import ExpertWeights, Weight
from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full, minicpm_scales
from anydecode.models.families.values import Config, int_value, value_or
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import MAX_COUNT, MAX_EXPERTS, number, refusal
from anydecode.models.linear import Linear
from anydecode.models.network import Experts, RmsNorm

_CHOICES = {
    "attention_type": ("mla",),
    "ffn_type": ("block", "block_linear"),
    "router_act": ("relu",),
    "norm_after_router": ("rms", "sum", "none"),
    "num_shared_experts": (0,),
}


def _derived(config: Config) -> dict[str, Any]:
    """The size of values, and the routing: all blocks may run."""
    for key, allowed in _CHOICES.items():
        if value_or(config, key, allowed[0]) not in allowed:
            raise refusal(key, config[key], f"one of {allowed}")
    count = int_value(config, "num_experts", high=MAX_EXPERTS)
    heads = int_value(config, "num_attention_heads", high=MAX_COUNT)
    return {
        "v_head_dim": int_value(config, "hidden_size") // heads,
        "num_experts_per_tok": count,
        "norm_topk_prob": config["norm_after_router"] == "sum",
        "routed_scaling_factor": number("norm_scale", value_or(config, "norm_scale", 1.0)),
    }


def read_blocks(
    reader: TensorReader, config: Config, layer: str, shape: tuple[int, int]
) -> Experts:
    """The router and the blocks of one layer; `shape` is their number and the hidden size."""
    (count, hidden), name = shape, f"{layer}.mlp"
    inner = int_value(config, "expert_size", high=MAX_COUNT)
    if config["ffn_type"] == "block":
        up = reader.stacked(f"{name}.up_proj", (count, inner, hidden))
        down = reader.stacked(f"{name}.down_proj", (count, hidden, inner))
    else:
        up = reader.stacked(f"{name}.up_proj", (count * inner, hidden))
        up = up.reshape(count, inner, hidden)
        down = reader.stacked(f"{name}.down_proj", (hidden, count * inner))
        down = down.reshape(hidden, count, inner).swapaxes(0, 1)

    def matrices(kind: str, stack: np.ndarray) -> list[Weight]:
        return [
            reader.convert(plain_weight(np.ascontiguousarray(part)), f"{name}.{block}.{kind}_proj")
            for block, part in enumerate(stack)
        ]

    # A router is small, and quantising it would change which blocks run.
    router = Linear(reader.matrix(f"{name}.router_proj", shape, keep_format=True))
    experts = Experts(router, ExpertWeights([], matrices("up", up), matrices("down", down)))
    if config["norm_after_router"] == "rms":
        eps = number("rms_norm_eps", value_or(config, "rms_norm_eps", 1e-6), 0.0, 1.0)
        experts.router_norm = RmsNorm(reader.vector(f"{name}.router_norm.weight", count), eps)
    return experts


BLOCKFFN = Family(
    ("BlockFFNForCausalLM", "MiniCPMForCausalLM"),
    all_full,
    scales=minicpm_scales,
    has_latent_attention=True,
    mlp="plain",
    moe=MixtureOfExperts("expert_size", is_normalised=False, scoring="given", is_blocks=True),
    derived=_derived,
    model_types=("minicpm",),
    is_own=lambda config: config.get("ffn_type") in ("block", "block_linear"),
    defaults={
        "attention_type": "mla",
        "ffn_type": "block",
        "norm_after_router": "sum",
        "expert_size": 128,
        "num_experts": 40,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "tie_word_embeddings": True,
    },
)


@register(
    Card(
        "blockffn",
        "serving",
        paper="Song et al. 2025, BlockFFN: Towards End-Side Acceleration-Friendly"
        " Mixture-of-Experts with Chunk-Level Activation Sparsity (arXiv:2507.08771)",
        exactness="token-exact",
        use="LLM(folder of such a model), which anydecode train blocks writes",
        summary="MLPs in blocks that a router of ReLU and norm selects; a pass reads these alone.",
        needs=("a BlockFFN model",),
        works_with=("every decoder", "batches", "prefix caches"),
        deviations=(
            "the kernel takes any number of rows and blocks; the paper's are for 1 or 32 tokens",
            "a block's weight multiplies its output, not the input of its second matrix",
            "the training (anydecode train blocks) is of a small model on the tasks; the factors of"
            " its losses are constant, where the released code adapts that of the chunk loss",
        ),
    )
)
def blockffn() -> Family:
    """The family of BlockFFN models."""
    return BLOCKFFN
