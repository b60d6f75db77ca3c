"""openPangu-Embedded (Huawei, 2025, arXiv:2505.22375): Llama with biases in attention."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "pangu-embedded": family_like(
        "llama",
        "PanguEmbeddedForCausalLM",
        model_types=("PanguEmbedded",),
        keys={"bias": ("attention_bias",)},
        defaults={"attention_bias": True},
    )
}
