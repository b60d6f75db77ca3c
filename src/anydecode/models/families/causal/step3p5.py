"""Step-3.5 and 3.7 (StepFun, 2026): attention with a gate for each head, more heads in layers with
a window, and activations that some layers cap."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.causal.step3 import unlisted_layers
from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import FULL, SLIDING, all_full, dense_layers
from anydecode.models.families.values import (
    Config,
    list_value,
    mapping_value,
    num_layers,
    value_or,
)
from anydecode.models.limits import refusal


def _each(config: Config, key: str, default: Any) -> list[Any]:
    """One value for each layer, from a list or from one value for all. Lists may go on with those
    of layers that predict further tokens."""
    value, count = value_or(config, key, default), num_layers(config)
    values = value if isinstance(value, list) else [value] * count
    if len(values) < count:
        raise refusal(key, value, f"one value, or one for each of {count} layers")
    return values[:count]


def _layers(config: Config) -> dict[str, Any]:
    """What layers differ in."""
    types = (list_value(config, "layer_types", str) or all_full(config))[: num_layers(config)]
    by_list = config.get("mlp_layer_types") is not None
    dense = dense_layers(config) if by_list else unlisted_layers(config, num_dense=3)
    other = mapping_value(config, "attention_other_setting")
    heads = {
        "num_attention_heads": other.get("num_attention_heads")
        or config.get("num_sliding_attention_heads"),
        "num_key_value_heads": other.get("num_attention_groups"),
    }
    heads = {key: count for key, count in heads.items() if count is not None}
    caps, shared = (_each(config, f"swiglu_limits{part}", 0.0) for part in ("", "_shared"))
    layers: dict[str, Any] = {}
    for layer, kind in enumerate(types):
        own = dict(heads) if kind == SLIDING else {}
        is_dense = layer in dense["mlp_only_layers"]
        own["swiglu_cap"] = (shared if is_dense else caps)[layer] or None  # 0: no limit
        own["shared_swiglu_cap"] = shared[layer] or None
        layers[str(layer)] = own
    return {
        "layer_types": types,
        "per_layer_config": layers,
        "rope_parameters": mapping_value(config, "rope_parameters") or _rope(config, types),
        "rope_theta": None,
        "rope_scaling": None,
        **dense,
    }


def _rope(config: Config, types: list[str]) -> dict[str, Any]:
    """The parameters of each type of layers: those of its first layer. Only layers of full
    attention have a scaling."""
    thetas, shares = (
        _each(config, key, default)
        for key, default in (("rope_theta", 10_000.0), ("partial_rotary_factors", 1.0))
    )
    found = {}
    for kind in set(types):
        first = types.index(kind)
        scaling = mapping_value(config, "rope_scaling") if kind == FULL else {}
        found[kind] = {
            **scaling,
            "rope_theta": thetas[first],
            "partial_rotary_factor": shares[first],
        }
    return found


FAMILIES = {
    "step3p5": Family(
        ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
        all_full,
        model_types=("step3p7",),
        qk_norm="head",
        norm_offset=1.0,
        attention_gate="sigmoid",
        gates_heads=True,
        has_partial_rotary=True,
        keys={
            "num_attention_groups": ("num_key_value_heads",),
            "moe_num_experts": ("num_experts",),
            "moe_top_k": ("num_experts_per_tok",),
            "moe_router_scaling_factor": ("routed_scaling_factor",),
            "share_expert_dims": ("share_expert_dim",),
            "norm_expert_weight": ("norm_topk_prob",),
        },
        derived=_layers,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 128_000,
        },
        moe=MixtureOfExperts(
            scoring="sigmoid",
            has_selection_bias=True,
            shared_module="share_expert",
            shared_size="share_expert_dim",
        ),
    )
}
