"""DBRX (Databricks, 2024): experts and layer norms; its layout is converted when it is loaded."""

from __future__ import annotations

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "dbrx": Family(
        ("DbrxForCausalLM", "DBRXForCausalLM"),
        all_full,
        norm="layer",
        has_qkv_limit=True,
        moe=MixtureOfExperts("intermediate_size"),
    )
}
