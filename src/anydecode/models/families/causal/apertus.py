"""Apertus (Swiss AI, 2025, arXiv:2509.14233)."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "apertus": Family(
        ("ApertusForCausalLM",),
        all_full,
        qk_norm="head",
        mlp="plain",
        names={
            "input_layernorm": "attention_layernorm",
            "post_attention_layernorm": "feedforward_layernorm",
        },
        defaults={"hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0},
    )
}
