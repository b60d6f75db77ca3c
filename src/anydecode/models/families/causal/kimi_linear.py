"""Kimi Linear (Moonshot AI, 2025, arXiv:2510.26692): Kimi delta attention in three of four layers,
latent attention without position embedding in the others, and experts."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import FULL, listed_dense_layers, no_rope
from anydecode.models.families.recurrent import KIMI_DELTA
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


FAMILIES = {
    "kimi_linear": Family(
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
}
