"""DiffusionGemma (Google DeepMind, 2026): the layers of Gemma 4 with experts, in two roles.

As a causal context, layers have other scales than as the canvas behind it, which holds random
tokens in place of masks. Of the published checkpoints the language model is read.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family
from anydecode.models.families.patterns import gemma4_layers
from anydecode.models.families.values import Config


def _layers(config: Config) -> dict[str, Any]:
    """What the configs of Gemma 4 say and these do not, since all of their models have it."""
    fixed = {
        "enable_moe_block": bool(config.get("num_experts")),
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    }
    return fixed | gemma4_layers({**config, **fixed})


FAMILIES = {
    "diffusion_gemma_text": diffusion_family(
        "gemma4_text",
        "DiffusionGemmaForBlockDiffusion",
        denoising=Denoising(
            "DiffusionGemma-26B-A4B",
            context="causal",
            block_size="canvas_length",
            default_block_size=256,
            has_canvas=True,
            decoder="diffusion-gemma:cache=block",
        ),
        derived=_layers,
    )
}
