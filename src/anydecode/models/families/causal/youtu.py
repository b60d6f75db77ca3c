"""Youtu-LLM (Tencent, 2025, arXiv:2512.24618): latent attention and MLPs without experts."""

from __future__ import annotations

from dataclasses import replace

from anydecode.models.families.table import FAMILIES as TABLE

FAMILIES = {
    "youtu": replace(
        TABLE["deepseek_v3"],
        architectures=("YoutuForCausalLM",),
        moe=None,
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    )
}
