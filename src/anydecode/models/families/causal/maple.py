"""Maple (Deepgrove, 2026): experts with limited activations, and layers of full attention without
positions."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full, rope_if_sliding
from anydecode.models.families.values import Config, bool_value, int_value
from anydecode.models.limits import refusal


def _check_options(config: Config) -> dict[str, Any]:
    """Refuse what no published model has."""
    if not bool_value(config, "nope_on_global_attention"):
        raise refusal("nope_on_global_attention", False, "true")
    if int_value(config, "num_shared_experts", 0, low=0):
        raise refusal("num_shared_experts", config["num_shared_experts"], "0")
    return {}


FAMILIES = {
    "maple": Family(
        ("MapleForCausalLM",),
        all_full,
        qk_norm="head",
        has_partial_rotary=True,
        rope_layers=rope_if_sliding,
        derived=_check_options,
        has_limited_swiglu=True,
        # No key says the limit.
        defaults={"swiglu_limit": 7.0},
        moe=MixtureOfExperts(),
    )
}
