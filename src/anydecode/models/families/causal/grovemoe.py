"""GroveMoE (Wu et al., 2025, arXiv:2508.07785): Qwen3 with experts, every two of which share a
further one, which has the sum of their weights."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.like import family_like
from anydecode.models.families.values import Config


def _options(config: Config) -> dict[str, Any]:
    """The published code normalises weights whatever the config says."""
    return {"norm_topk_prob": True}


FAMILIES = {
    "grovemoe": family_like(
        "qwen3_moe",
        # Configs name the module of the class, too.
        *("GroveMoeForCausalLM", "modeling_grove_moe.GroveMoeForCausalLM"),
        model_types=("grove_moe",),
        is_own=lambda config: True,
        derived=_options,
        defaults={
            "sliding_window": 4096,
            "experts_per_group": 2,
            "group_expert_size": 128,
            "group_scale": 0.05,
        },
        moe=MixtureOfExperts(by_logits=True, group_size="experts_per_group"),
    )
}
