"""Dream (Ye et al., "Dream 7B: Diffusion Large Language Models", arXiv:2508.15487) and the models
of its classes."""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family

FAMILIES = {
    "dream": diffusion_family(
        "qwen2",
        "DreamModel",
        model_types=("Dream",),
        denoising=Denoising(
            "Dream-7B, Dream-Coder, DreamOn, DiffuCoder", shift=1, mask_token=151666
        ),
    )
}
