"""Gemma 4 12B (Google, 2026), whose language model is Gemma 4 without embeddings of tokens in every
layer."""

from __future__ import annotations

from anydecode.models.families.like import family_like
from anydecode.models.families.table import FAMILIES as OTHERS

FAMILIES = {
    "gemma4_unified_text": family_like(
        "gemma4_text",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
        defaults={
            **OTHERS["gemma4_text"].defaults,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
        },
    )
}
