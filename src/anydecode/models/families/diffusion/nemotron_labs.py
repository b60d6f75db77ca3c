"""Nemotron-Labs-Diffusion 3B and 8B: the layers of Ministral 3, trained to fill blocks behind a
causal context and to predict the next token, which is how the first token of a block is found.
Of the vision-language checkpoint the language model is read. Older ones have the classes
`MinistralDiffEncoderModel` and `MinistralDLMConfig`.

The same weights open as a causal model with `family="nemotron_labs_diffusion_ar"`, or where the
config has the class `NemotronLabsDiffusionForCausalLM`.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.dispatch import class_names
from anydecode.models.families.family import Denoising
from anydecode.models.families.like import diffusion_family, family_like
from anydecode.models.families.values import Config
from anydecode.models.limits import refusal

_CAUSAL = "NemotronLabsDiffusionForCausalLM"
_MODEL_TYPES = ("nemotron_labs_diffusion_vlm", "ministral_dlm")
#: Values of `dlm_paradigm` that name a mode of the same weights; the others are of their training.
_PARADIGMS = (None, "bidirectional", "autoregressive")


def _checked(config: Config) -> dict[str, Any]:
    """Refuse models that were saved in a mode of the training."""
    paradigm = config.get("dlm_paradigm")
    if paradigm not in _PARADIGMS:
        raise refusal("dlm_paradigm", paradigm, "'bidirectional' or 'autoregressive'")
    return {"sliding_window": None}


FAMILIES = {
    "nemotron_labs_diffusion": diffusion_family(
        "ministral3",
        "NemotronLabsDiffusionModel",
        "NemotronLabsDiffusionVLMModel",
        "MinistralDiffEncoderModel",
        model_types=_MODEL_TYPES,
        denoising=Denoising(
            "Nemotron-Labs-Diffusion 3B, 8B, 14B, VLM (text)",
            context="causal",
            context_predicts_next=True,
            block_size="block_size",
            needs_block_size=True,
            mask_token=100,
            decoder="fast-dllm-v2:sub_block=32,threshold=0.9",
        ),
        derived=_checked,
    ),
    "nemotron_labs_diffusion_ar": family_like(
        "ministral3",
        _CAUSAL,
        model_types=("nemotron_labs_diffusion", *_MODEL_TYPES),
        is_own=lambda config: _CAUSAL in class_names(config),
        derived=_checked,
    ),
}
