"""Cohere 2 with experts (Cohere, 2026): the norms are layer norms or, if the config has an epsilon
for them, RMS norms."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import SLIDING, dense_layers, full_every_nth
from anydecode.models.families.values import Config, int_value, list_value, num_layers, value_or
from anydecode.models.limits import refusal

_NAME = "Cohere2MoeForCausalLM"


def _layer_types(config: Config) -> list[str]:
    """A window in all but every n-th layer, counted anew behind the dense layers, which have a
    period of their own."""
    first = int_value(config, "first_k_dense_replace", 0, low=0)
    period = int_value(config, "prefix_dense_sliding_window_pattern", 1)
    dense = {"num_hidden_layers": first, "sliding_window_pattern": period}
    rest = {**config, "num_hidden_layers": num_layers(config) - first}
    return [*(full_every_nth(dense) if first else []), *full_every_nth(rest)]


def _layers(config: Config) -> dict[str, Any]:
    """Which layers have experts, their sizes, and how outputs of experts are weighted."""
    if "shared_factor" in config:
        return {}
    found: dict[str, Any] = {"layer_types": list_value(config, "layer_types", str)}
    found["layer_types"] = found["layer_types"] or _layer_types(config)
    if config.get("mlp_layer_types") is not None:
        found |= dense_layers(config)
    key = "shared_expert_combination_strategy"
    strategy, is_shared = value_or(config, key, "average"), config.get("n_shared_experts")
    if strategy not in ("average", "sum"):
        raise refusal(key, strategy, "average or sum")
    if config.get("scoring_func") == "softmax":
        found["norm_topk_prob"] = True
    factor = 0.5 if strategy == "average" and is_shared else 1.0
    inner = config.get("intermediate_size")
    return {
        **found,
        "shared_factor": factor,
        "routed_scaling_factor": factor,
        "moe_intermediate_size": inner,
        "intermediate_size": value_or(config, "prefix_dense_intermediate_size", inner),
    }


def _rope_layers(config: Config, layer_types: list[str]) -> list[bool]:
    """A rotary embedding in layers with a window, and in dense ones without a period."""
    first = int_value(config, "first_k_dense_replace", 0, low=0)
    dense = {*range(first), *(list_value(config, "mlp_only_layers", int) or ())}
    is_forced = int_value(config, "prefix_dense_sliding_window_pattern", 1) == 1
    return [
        kind == SLIDING or (is_forced and layer in dense) for layer, kind in enumerate(layer_types)
    ]


_SETTINGS: dict[str, Any] = {
    "layer_types": _layer_types,
    "rope_layers": _rope_layers,
    "derived": _layers,
    "keys": {
        "num_shared_experts": ("n_shared_experts",),
        "expert_selection_fn": ("scoring_func",),
    },
    "defaults": {
        "head_dim": 128,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "n_shared_experts": 0,
        "scoring_func": "softmax",
    },
    "moe": MixtureOfExperts(scoring=("softmax", "sigmoid"), shared_module="shared_experts"),
}
FAMILIES = {
    "cohere2_moe": family_like("cohere2", _NAME, **_SETTINGS),
    "cohere2_moe_rms": family_like(
        "cohere2",
        _NAME,
        model_types=("cohere2_moe",),
        is_own=lambda config: (
            config.get("model_type") == "cohere2_moe" and config.get("rms_norm_eps") is not None
        ),
        norm="rms",
        **_SETTINGS,
    ),
}
