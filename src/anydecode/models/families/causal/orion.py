"""Orion (OrionStar, 2024, arXiv:2401.12246): Llama with layer norms."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "orion": Family(
        ("OrionForCausalLM",),
        all_full,
        norm="layer",
        has_norm_bias=True,
        keys={"rms_norm_eps": ("layer_norm_eps",)},
    )
}
