"""The language model of Qwen3-VL with experts (Qwen team, 2025, arXiv:2511.21631)."""

from __future__ import annotations

from dataclasses import replace

from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.table import FAMILIES as TABLE

FAMILIES = {
    "qwen3_vl_moe_text": replace(
        TABLE["qwen3_moe"],
        architectures=("Qwen3VLMoeForConditionalGeneration",),
        moe=MixtureOfExperts(may_be_transposed=True),
    )
}
