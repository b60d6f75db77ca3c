"""Persimmon (Adept, 2023), whose layout is converted when it is loaded."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "persimmon": Family(
        ("PersimmonForCausalLM",),
        all_full,
        norm="layer",
        has_norm_bias=True,
        qk_norm="heads",
        mlp="plain",
        has_partial_rotary=True,
        defaults={"partial_rotary_factor": 0.5, "mlp_bias": True},
    )
}
