"""Mellum 2 (JetBrains, 2026): Qwen3 with experts, and with layers of either type of attention."""

from __future__ import annotations

from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import all_full, listed_dense_layers

FAMILIES = {
    "mellum": family_like(
        "qwen3_moe",
        "MellumForCausalLM",
        layer_types=all_full,
        derived=listed_dense_layers,
        defaults={"head_dim": 128, "sliding_window": 1024},
        moe=MixtureOfExperts(),
    )
}
