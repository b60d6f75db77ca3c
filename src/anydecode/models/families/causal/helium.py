"""Helium (Kyutai, 2025)."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "helium": Family(
        ("HeliumForCausalLM",),
        all_full,
        interleaved_rope=True,
        defaults={"head_dim": 128, "rms_norm_eps": 1e-8},
    )
}
