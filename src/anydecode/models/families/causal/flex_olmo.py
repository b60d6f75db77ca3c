"""FlexOlmo (Shi et al., 2025, arXiv:2507.07024): OLMo 2 with experts that were trained apart."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "flex_olmo": family_like(
        "olmoe",
        "FlexOlmoForCausalLM",
        norms="post",
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 500_000.0},
    )
}
