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
        qk_norm="heads",
        shares_norm=True,
        is_parallel=True,
        has_partial_rotary=True,
        keys={"use_qkv_bias": ("qkv_bias",), "qk_layernorm": ("use_qk_norm",)},
        names={
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
        },
        defaults={
            "use_parallel_residual": False,
            "partial_rotary_factor": 0.25,
            "use_qk_norm": False,
        },
    )
}
