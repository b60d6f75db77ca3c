"""Laguna (Poolside, 2026): experts behind dense layers, and attention with a gate for each head or
each number. Layers with a window may have more heads than the others."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import FULL, SLIDING, all_full, dense_layers
from anydecode.models.families.values import Config, list_value, mapping_value, num_layers
from anydecode.models.limits import refusal

_GATES = {True: True, "per-head": True, "per-element": False}


def _layers(config: Config) -> dict[str, Any]:
    """What layers differ in, and whether gates are those of heads."""
    for key, allowed in (
        ("moe_apply_router_weight_on_input", "false"),
        ("moe_router_logit_softcapping", "0"),
    ):
        if config.get(key):
            raise refusal(key, config[key], allowed)
    gating = config.get("gating", True)
    if not isinstance(gating, (bool, str)) or gating not in _GATES:
        raise refusal("gating", gating, f"one of {tuple(_GATES)}")
    rope = {
        FULL: {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    }
    found = {
        "gates_heads": _GATES[gating],
        "rope_parameters": mapping_value(config, "rope_parameters") or rope,
        **dense_layers(config),
    }
    key = "num_attention_heads_per_layer"
    heads, count = list_value(config, key, int), num_layers(config)
    if heads is not None:
        if len(heads) < count:
            raise refusal(key, heads, f"one number for each of {count} layers")
        own = {str(layer): {"num_attention_heads": heads[layer]} for layer in range(count)}
        found["per_layer_config"] = own
    return found


FAMILIES = {
    "laguna": Family(
        ("LagunaForCausalLM",),
        all_full,
        qk_norm="head",
        attention_gate="softplus",
        gates_heads=True,
        has_partial_rotary=True,
        keys={"moe_routed_scaling_factor": ("routed_scaling_factor",)},
        derived=_layers,
        defaults={"head_dim": 128, "num_key_value_heads": 8, "sliding_window": 512},
        moe=MixtureOfExperts(
            scoring="sigmoid",
            has_selection_bias=True,
            shared_module="shared_experts",
            shared_size="shared_expert_intermediate_size",
        ),
    )
}
