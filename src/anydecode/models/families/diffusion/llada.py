"""LLaDA (Nie et al., "Large Language Diffusion Models", arXiv:2502.09992) and LLaDA-1.5.

Their own layout is converted when they are loaded, `models/loading/llada.py`.
"""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family

FAMILIES = {
    "llada": diffusion_family(
        "llama",
        "LLaDAModelLM",
        denoising=Denoising("LLaDA-8B, LLaDA-1.5", mask_token=126336),
        defaults={"rms_norm_eps": 1e-5},
    )
}
