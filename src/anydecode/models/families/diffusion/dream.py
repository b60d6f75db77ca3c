"""Dream (Ye et al., "Dream 7B: Diffusion Large Language Models", arXiv:2508.15487) and the models
of its classes.

Of DreamOn, which fills regions of variable length, the config has `expand_token_id`.
"""

from __future__ import annotations

from functools import partial

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family

_family = partial(diffusion_family, "qwen2", model_types=("Dream",))

FAMILIES = {
    "dream": _family(
        "DreamModel",
        denoising=Denoising("Dream-7B, Dream-Coder, DiffuCoder", shift=1, mask_token=151666),
    ),
    "dreamon": _family(
        "DreamModel",
        is_own=lambda config: config.get("expand_token_id") is not None,
        denoising=Denoising(
            "DreamOn-7B",
            shift=1,
            mask_token=151666,
            decoder="dream-coder",
            expand_token="expand_token_id",
        ),
    ),
}
