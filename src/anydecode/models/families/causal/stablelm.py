"""StableLM (Bellagente et al., 2024, arXiv:2402.17834)."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "stablelm": Family(
        ("StableLmForCausalLM", "StableLMEpochForCausalLM"),
        all_full,
        model_types=("stablelm_epoch",),
        norm="layer",
        has_norm_bias=True,
        shares_norm=True,
        is_parallel=True,
        has_partial_rotary=True,
        keys={"use_qkv_bias": ("qkv_bias",)},
        defaults={"use_parallel_residual": False, "partial_rotary_factor": 0.25},
    )
}
