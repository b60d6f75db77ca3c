"""The language models of Qwen3-VL with experts (Qwen team, 2025, arXiv:2511.21631) and of
Qwen3-Omni (arXiv:2509.17765)."""

from __future__ import annotations

from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.like import family_like

FAMILIES = {
    "qwen3_vl_moe_text": family_like(
        "qwen3_moe",
        "Qwen3VLMoeForConditionalGeneration",
        model_types=("qwen3_omni_moe_text",),
        moe=MixtureOfExperts(is_transposed=None),
    )
}
