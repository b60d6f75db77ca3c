"""RND1 (Chandrasegaran et al., "RND1: Simple, Scalable AR-to-Diffusion Conversion", Radical
Numerics, 2025)."""

from __future__ import annotations

from anydecode.models.families.family import Denoising, MixtureOfExperts
from anydecode.models.families.like import diffusion_family

FAMILIES = {
    "rnd1": diffusion_family(
        "qwen3_moe",
        "RND1LM",
        "RND1",
        denoising=Denoising("RND1-Base-0910", shift=1, mask_token=151669),
        moe=MixtureOfExperts(),
    )
}
