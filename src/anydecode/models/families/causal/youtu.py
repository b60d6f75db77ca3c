"""Youtu-LLM (Tencent, 2025, arXiv:2512.24618): latent attention and MLPs without experts."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "youtu": family_like(
        "deepseek_v3",
        "YoutuForCausalLM",
        moe=None,
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    )
}
