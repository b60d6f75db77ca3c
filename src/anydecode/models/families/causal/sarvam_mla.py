"""Sarvam 105B (Sarvam AI, 2026): DeepSeek-V3 with other names of keys."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.values import Config, mapping_value

_YARN = "deepseek_yarn"


def _usual_yarn(config: Config) -> dict[str, Any]:
    """The scaling of rotary frequencies under its usual name."""
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        scaling = mapping_value(config, key)
        if _YARN in (scaling.get("rope_type"), scaling.get("type")):
            found[key] = {**scaling, "type": "yarn", "rope_type": "yarn"}
    return found


FAMILIES = {
    "sarvam_mla": family_like(
        "deepseek_v3",
        "SarvamMLAForCausalLM",
        derived=_usual_yarn,
        keys={
            "num_experts": ("n_routed_experts",),
            "num_shared_experts": ("n_shared_experts",),
            "score_function": ("scoring_func",),
            "moe_router_enable_expert_bias": ("use_expert_bias",),
        },
        defaults={
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-6,
        },
    )
}
