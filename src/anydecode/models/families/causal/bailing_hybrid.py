"""Ling 3 (inclusionAI, 2026): Kimi delta attention in five of six layers, latent attention with a
gate for each head in the others, and experts."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import FULL, listed_dense_layers
from anydecode.models.families.recurrent import LIMITED_DELTA
from anydecode.models.families.values import Config, int_value, num_layers, value_or
from anydecode.models.limits import refusal


def _layer_types(config: Config) -> list[str]:
    """Full attention in the last layer of each group, and in those behind the last whole group."""
    count, size = num_layers(config), int_value(config, "layer_group_size", 6)
    whole = count // size * size
    return [
        FULL if (layer + 1) % size == 0 or layer >= whole else "linear_attention"
        for layer in range(count)
    ]


def _sizes(config: Config) -> dict[str, Any]:
    """The sizes of the recurrence, whose heads are as many as those of attention."""
    for key, allowed in (
        ("no_kda_lora", True),
        ("gated_attention_proj_granularity_type", "head_wise"),
    ):
        if value_or(config, key, allowed) != allowed:
            raise refusal(key, config[key], str(allowed).lower())
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if any(value_or(config, key, [])):
            raise refusal(key, config[key], "null: limits of activations are not supported")
    return {
        "linear_num_heads": value_or(config, "linear_num_heads", config["num_attention_heads"]),
        "linear_head_dim": value_or(config, "linear_head_dim", config.get("head_dim", 128)),
        "linear_conv_kernel_dim": value_or(config, "short_conv_kernel_size", 4),
        **listed_dense_layers(config),
    }


FAMILIES = {
    "bailing_hybrid": Family(
        ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM"),
        _layer_types,
        has_latent_attention=True,
        interleaved_rope=True,
        attention_gate="sigmoid",
        gates_heads=True,
        recurrent=LIMITED_DELTA,
        derived=_sizes,
        keys={
            "model_max_length": ("max_position_embeddings",),
            "moe_renormalize": ("norm_topk_prob",),
            "num_expert_group": ("n_group",),
            "num_experts_per_token": ("num_experts_per_tok",),
            "num_shared_experts": ("n_shared_experts",),
        },
        other_names={"embed_tokens": "word_embeddings"},
        defaults={
            "first_k_dense_replace": 2,
            "rms_norm_eps": 1e-6,
            "rope_theta": 6e6,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
        },
        moe=MixtureOfExperts(
            scoring="sigmoid", has_selection_bias=True, shared_module="shared_experts"
        ),
    )
}
