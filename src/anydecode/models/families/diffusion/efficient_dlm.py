"""Efficient-DLM (Fu et al., "Efficient-DLM: From Autoregressive to Diffusion Language Models, and
Beyond in Speed", 2025).

The configs have the model type of the causal model that was trained further, so that the
architecture alone tells them apart. Neither block size nor mask token is known where the config
does not have them. As in the published generation code, the prompt is one block, and the others are
counted from its end.
"""

from __future__ import annotations

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family


def _denoising(models: str) -> Denoising:
    return Denoising(
        models,
        context="prompt",
        block_size="block_size",
        needs_block_size=True,
        decoder="sdar:threshold=0.9",
    )


FAMILIES = {
    "efficient_dlm": diffusion_family(
        "qwen3",
        "EfficientDLM",
        is_own=lambda config: config.get("model_type") != "qwen2",
        denoising=_denoising("Efficient-DLM 4B, 8B"),
    ),
    "efficient_dlm_qwen2": diffusion_family(
        "qwen2",
        "EfficientDLM",
        is_own=lambda config: config.get("model_type") == "qwen2",
        denoising=_denoising("Efficient-DLM 1.5B"),
    ),
}
