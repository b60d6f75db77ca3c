"""Hunyuan-A13B (Tencent, 2025)."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.like import family_like
from anydecode.models.families.values import Config
from anydecode.models.limits import refusal

#: Keys that have one number, or a list with the number of each layer.
_COUNTS = {
    "num_experts": "num_experts",
    "moe_topk": "num_experts_per_tok",
    "num_shared_expert": "n_shared_experts",
    "moe_intermediate_size": "moe_intermediate_size",
}


def _counts(config: Config) -> dict[str, Any]:
    """The sizes of the experts, which are those of every layer."""
    found = {"moe_intermediate_size": config.get("intermediate_size")}
    for key, target in _COUNTS.items():
        value = config.get(key)
        if isinstance(value, list):
            if not value or any(one != value[0] for one in value):
                raise refusal(key, value, "the same number for every layer")
            value = value[0]
        if value is not None:
            found[target] = value
    return found


FAMILIES = {
    "hunyuan_v1_moe": family_like(
        "hunyuan_v1_dense",
        "HunYuanMoEV1ForCausalLM",
        derived=_counts,
        moe=MixtureOfExperts(shared_module="shared_mlp"),
    )
}
