"""Solar Open (Upstage, 2026): experts in every layer, without norms of queries and keys."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "solar_open": family_like(
        "glm4_moe",
        "SolarOpenForCausalLM",
        qk_norm=None,
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "first_k_dense_replace": 0,
        },
    )
}
