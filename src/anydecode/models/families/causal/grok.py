"""Grok 1 (xAI, 2024) and Grok 2 (2025), whose experts have an MLP beside them, both with capped
scores of attention and of the router. Checkpoints whose matrices are divided among files (Grok 2
as published) do not open; GGUF files do."""

from __future__ import annotations

from math import sqrt
from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts, Scales
from anydecode.models.families.patterns import all_full
from anydecode.models.families.values import Config, bool_value, head_dim, int_value, value_or
from anydecode.models.limits import number


def _options(config: Config) -> dict[str, Any]:
    """The sum of experts and of the MLP beside them is divided by sqrt(2)."""
    inner = int_value(config, "intermediate_size")
    has_mlp = bool_value(config, "residual_moe")
    factor = {"routed_scaling_factor": sqrt(0.5), "shared_factor": sqrt(0.5)} if has_mlp else {}
    return {
        "moe_intermediate_size": int_value(config, "moe_intermediate_size", inner),
        "mlp_beside_experts_size": inner if has_mlp else 0,
        **factor,
    }


def _scales(config: Config) -> Scales:
    embedding, logits = (
        number(key, value_or(config, key, 1.0))
        for key in ("embedding_multiplier_scale", "output_multiplier_scale")
    )
    usual = head_dim(config) ** -0.5
    attention = number("attn_output_multiplier", value_or(config, "attn_output_multiplier", usual))
    return Scales(embedding, attention, logits=logits)


FAMILIES = {
    "grok": Family(
        ("GrokForCausalLM", "Grok1ForCausalLM", "Grok1ModelForCausalLM"),
        all_full,
        model_types=("grok-1", "grok-2", "grok1", "grok2"),
        norms="both",
        has_attention_softcap=True,
        scales=_scales,
        derived=_options,
        moe=MixtureOfExperts(shared_module="mlp", shared_size="mlp_beside_experts_size"),
        names={
            "input_layernorm": "pre_attn_norm",
            "post_attention_layernorm": "post_attn_norm",
            "pre_feedforward_layernorm": "pre_moe_norm",
            "post_feedforward_layernorm": "post_moe_norm",
        },
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "num_experts_per_tok": 2,
            "attn_logit_softcapping": 30.0,
            "router_logit_softcapping": 30.0,
            "rms_norm_eps": 1e-5,
        },
    )
}
