"""Nemotron-4 and Minitron (Parmar et al., 2024, arXiv:2402.16819)."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "nemotron": Family(
        ("NemotronForCausalLM",),
        all_full,
        norm="layer",
        has_norm_bias=True,
        norm_offset=1.0,
        mlp="plain",
        has_partial_rotary=True,
        keys={"norm_eps": ("layer_norm_eps",)},
        defaults={"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    )
}
