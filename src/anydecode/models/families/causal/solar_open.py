"""Solar Open (Upstage, 2026): experts in every layer, without norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from anydecode.models.families.table import FAMILIES as TABLE

FAMILIES = {
    "solar_open": replace(
        TABLE["glm4_moe"],
        architectures=("SolarOpenForCausalLM",),
        model_types=(),
        qk_norm=None,
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "first_k_dense_replace": 0,
        },
    )
}
