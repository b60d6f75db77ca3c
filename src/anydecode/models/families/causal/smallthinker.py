"""SmallThinker (Song et al., 2025, arXiv:2507.20984): experts whose router reads the inputs of the
layer, so that they can be fetched while the attention is computed."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import FULL, SLIDING
from anydecode.models.families.values import Config, bool_value, list_value, num_layers
from anydecode.models.limits import refusal


def _flags(config: Config, key: str, default: int) -> list[int]:
    """A flag for each layer."""
    count = num_layers(config)
    flags = list_value(config, key, int)
    if flags is None:
        return [default] * count
    if len(flags) < count or not set(flags) <= {0, 1}:
        raise refusal(key, flags, f"a list of {count} numbers, 0 or 1")
    return flags[:count]


def _layer_types(config: Config) -> list[str]:
    return [SLIDING if flag else FULL for flag in _flags(config, "sliding_window_layout", 0)]


def _rope_layers(config: Config, layer_types: list[str]) -> list[bool]:
    return [bool(flag) for flag in _flags(config, "rope_layout", 1)]


def _options(config: Config) -> dict[str, Any]:
    """The activation, which no key says, and the function of the router's scores."""
    is_softmax = bool_value(config, "moe_primary_router_apply_softmax")
    return {"hidden_act": "relu", "scoring_func": "softmax" if is_softmax else "sigmoid"}


FAMILIES = {
    "smallthinker": Family(
        ("SmallThinkerForCausalLM",),
        _layer_types,
        rope_layers=_rope_layers,
        derived=_options,
        keys={
            "moe_num_primary_experts": ("num_experts",),
            "moe_num_active_primary_experts": ("num_experts_per_tok",),
            "moe_ffn_hidden_size": ("moe_intermediate_size",),
            "sliding_window_size": ("sliding_window",),
        },
        defaults={"head_dim": 128, "sliding_window": 4096, "tie_word_embeddings": True},
        moe=MixtureOfExperts(scoring=("sigmoid", "softmax"), by_logits=True, routes_inputs=True),
    )
}
