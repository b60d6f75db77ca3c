"""Hy3 (Tencent, 2026): Qwen3 with experts in all layers but the first."""

from __future__ import annotations

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full, listed_dense_layers

FAMILIES = {
    "hy_v3": Family(
        ("HYV3ForCausalLM",),
        all_full,
        qk_norm="head",
        keys={
            "num_shared_experts": ("n_shared_experts",),
            "router_scaling_factor": ("routed_scaling_factor",),
        },
        derived=listed_dense_layers,
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11_158_840.0,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.826,
        },
        moe=MixtureOfExperts(
            scoring="sigmoid", has_selection_bias=True, shared_module="shared_experts"
        ),
    )
}
