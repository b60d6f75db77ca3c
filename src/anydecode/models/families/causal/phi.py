"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al., 2023, arXiv:2306.11644)."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "phi": Family(
        ("PhiForCausalLM",),
        all_full,
        norm="layer",
        has_norm_bias=True,
        shares_norm=True,
        is_parallel=True,
        mlp="plain",
        has_partial_rotary=True,
        names={
            "norm": "final_layernorm",
            "self_attn.o_proj": "self_attn.dense",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
        },
        defaults={
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
        },
    )
}
