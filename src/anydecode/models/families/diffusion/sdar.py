"""SDAR (Cheng et al., "SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence
Generation", arXiv:2510.06303) and TraDo.

The configs lack the block size. It is the end of a checkpoint's name (-b32), if there is one, and
else 4, as in the published generation script and the servers that run these models.
"""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family


def _denoising(models: str) -> Denoising:
    return Denoising(
        models,
        context="blocks",
        block_size="block_size",
        default_block_size=4,
        mask_token=151669,
    )


FAMILIES = {
    "sdar": diffusion_family(
        "qwen3", "SDARForCausalLM", denoising=_denoising("SDAR 1.7B to 8B (-b4 to -b64), TraDo")
    ),
    "sdar_moe": diffusion_family(
        "qwen3_moe", "SDARMoeForCausalLM", denoising=_denoising("SDAR-30B-A3B")
    ),
}
