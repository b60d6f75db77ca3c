"""Dream-Reasoner: the layers of Qwen3, in blocks, where rows predict their own position.

The model type is that of Dream, whose rows see the whole canvas and predict the next position; the
class tells them apart.
"""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family

FAMILIES = {
    "dream_reasoner": diffusion_family(
        "qwen3",
        "DreamForCausalLM",
        denoising=Denoising(
            "Dream-Reasoner",
            context="blocks",
            block_size="block_size",
            needs_block_size=True,
            mask_token=151669,
            decoder="sdar:threshold=0.9",
        ),
    )
}
