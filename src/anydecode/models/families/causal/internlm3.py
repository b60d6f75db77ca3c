"""InternLM3 (Shanghai AI Laboratory, 2025)."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "internlm3": Family(
        ("InternLM3ForCausalLM",),
        all_full,
        keys={"qkv_bias": ("qkv_bias",), "bias": ("attention_out_bias", "mlp_bias")},
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    )
}
