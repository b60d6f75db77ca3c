"""Arcee's foundation models (AFM, 2025): Llama with an MLP without a gate."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "arcee": Family(
        ("ArceeForCausalLM",),
        all_full,
        mlp="plain",
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
    )
}
