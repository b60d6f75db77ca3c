"""OPT (Zhang et al., 2022, arXiv:2205.01068), whose layout is converted when it is loaded."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full, no_rope

FAMILIES = {
    "opt": Family(
        ("OPTForCausalLM",),
        all_full,
        rope_layers=no_rope,
        norm="layer",
        has_norm_bias=True,
        mlp="plain",
        has_position_table=True,
        keys={"enable_bias": ("attention_bias", "mlp_bias")},
        defaults={"attention_bias": True, "mlp_bias": True},
    )
}
