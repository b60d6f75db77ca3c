"""Stable-DiffCoder (Fan et al., "Stable-DiffCoder: Pushing the Frontier of Code Diffusion Large
Language Model", arXiv:2601.15892).

The configs have the model type of Llama, so that the class alone tells them apart. Block size and
mask token are those of the published generation code, and the decoder is that of the published
call, which unmasks one token per step.
"""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family

FAMILIES = {
    "stable_diffcoder": diffusion_family(
        "llama",
        "StableDiffcoderForCausalLM",
        denoising=Denoising(
            "Stable-DiffCoder-8B",
            context="blocks",
            block_size="block_size",
            default_block_size=4,
            mask_token=5,
            decoder="sdar:remasking=static",
        ),
    )
}
