"""Kimi Linear (Moonshot AI, 2025, arXiv:2510.26692): Kimi delta attention in three of four layers,
latent attention without position embedding in the others, and experts.

Kimi K3 (Moonshot AI, 2026, arXiv:2607.24653), its language model, has the same layers, with a limit
of the decay and gates of attention. Its sublayers read sums over blocks of layers, and its experts
projections of their inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import FULL, listed_dense_layers, no_rope
from anydecode.models.families.recurrent import KIMI_DELTA, LIMITED_DELTA
from anydecode.models.families.values import (
    Config,
    bool_value,
    list_value,
    mapping_value,
    num_layers,
    value_or,
)
from anydecode.models.limits import refusal

_LINEAR = "linear_attention"


def _layer_types(config: Config) -> list[str]:
    """Full attention in the layers that `full_attn_layers` counts from 1; without it in every
    fourth behind the first."""
    linear, count = mapping_value(config, "linear_attn_config"), num_layers(config)
    full = list_value(linear, "full_attn_layers", int)
    if full is None:
        return [FULL if layer and layer % 4 == 0 else _LINEAR for layer in range(count)]
    return [FULL if layer + 1 in full else _LINEAR for layer in range(count)]


def _sizes(config: Config) -> dict[str, Any]:
    """The sizes of the recurrence, which published configs have in an object of their own."""
    if not bool_value(config, "mla_use_nope", True):
        raise refusal("mla_use_nope", False, "true: attention has no position embedding")
    linear = mapping_value(config, "linear_attn_config")
    return {
        "linear_num_heads": value_or(linear, "num_heads", config["linear_num_heads"]),
        "linear_head_dim": value_or(linear, "head_dim", config["linear_head_dim"]),
        "linear_conv_kernel_dim": value_or(
            linear, "short_conv_kernel_size", config["linear_conv_kernel_dim"]
        ),
        **listed_dense_layers(config),
    }


def _is_k3(config: Config) -> bool:
    """Kimi K3 has the model type of Kimi Linear."""
    return config.get("attn_res_block_size") is not None


def _k3_layers(config: Config) -> dict[str, Any]:
    """Those of Kimi Linear; GGUF files have the limit of the decay outside an object."""
    linear = mapping_value(config, "linear_attn_config")
    low = value_or(linear, "gate_lower_bound", config.get("kda_lower_bound"))
    return {
        **_sizes(config),
        "kda_safe_gate": low is not None,
        "kda_lower_bound": low,
        "use_attention_gate": bool_value(config, "mla_use_output_gate"),
    }


_KIMI_LINEAR = Family(
    ("KimiLinearForCausalLM",),
    _layer_types,
    has_latent_attention=True,
    recurrent=KIMI_DELTA,
    rope_layers=no_rope,
    derived=_sizes,
    keys={
        "model_max_length": ("max_position_embeddings",),
        "moe_renormalize": ("norm_topk_prob",),
        "moe_router_activation_func": ("scoring_func",),
        "num_expert_group": ("n_group",),
        "num_experts_per_token": ("num_experts_per_tok",),
        "num_shared_experts": ("n_shared_experts",),
    },
    defaults={
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1 << 20,
    },
    moe=MixtureOfExperts(
        scoring="sigmoid", has_selection_bias=True, shared_module="shared_experts"
    ),
)

_K3 = replace(
    _KIMI_LINEAR,
    architectures=("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"),
    model_types=("kimi_linear",),
    is_own=_is_k3,
    recurrent=LIMITED_DELTA,
    attention_gate="sigmoid",
    has_residual_blocks=True,
    derived=_k3_layers,
    keys={**_KIMI_LINEAR.keys, "routed_expert_hidden_size": ("moe_latent_size",)},
)

FAMILIES = {"kimi_linear": _KIMI_LINEAR, "kimi_k3": _K3}
