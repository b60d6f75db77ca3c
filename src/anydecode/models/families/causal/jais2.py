"""Jais 2 (Inception, 2025): Llama with layer norms, with biases and with an MLP without a gate."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "jais2": Family(
        ("Jais2ForCausalLM",),
        all_full,
        norm="layer",
        has_norm_bias=True,
        mlp="plain",
        defaults={"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
    )
}
