"""CoDA (Chen et al., "CoDA: Coding LM via Diffusion Adaptation", 2025)."""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family

FAMILIES = {
    "coda": diffusion_family(
        "qwen3",
        "CoDALanguageModel",
        model_types=("CoDA",),
        denoising=Denoising("CoDA-1.7B", shift=1, mask_token=151669),
    )
}
