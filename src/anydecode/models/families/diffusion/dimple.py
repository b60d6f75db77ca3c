"""Dimple (Yu et al., "Dimple: Discrete Diffusion Multimodal Large Language Model with Parallel
Decoding", arXiv:2505.16990): of the published checkpoint the language model is read, which is that
of Dream. For text the three position coordinates are equal, so that positions are the usual ones.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family
from anydecode.models.families.values import Config, bool_value
from anydecode.models.limits import refusal


def _checked(config: Config) -> dict[str, Any]:
    """Refuse models with causal rows."""
    if not bool_value(config, "full_attn_mask", True):
        raise refusal("full_attn_mask", False, "true")
    return {}


FAMILIES = {
    "dimple": diffusion_family(
        "qwen2",
        "DimpleModel",
        denoising=Denoising("Dimple-7B (text)", shift=1, mask_token=151666, decoder="dimple"),
        derived=_checked,
    )
}
