"""The language model of Qwen3-VL with experts (Qwen team, 2025, arXiv:2511.21631)."""

from __future__ import annotations

from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.like import family_like

FAMILIES = {
    "qwen3_vl_moe_text": family_like(
        "qwen3_moe",
        "Qwen3VLMoeForConditionalGeneration",
        moe=MixtureOfExperts(is_transposed=None),
    )
}
