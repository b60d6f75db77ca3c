"""BitNet b1.58 2B4T (Ma et al., 2025, arXiv:2504.12285): Llama with norms in front of the last
matrix of each sublayer."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_full

FAMILIES = {
    "bitnet": Family(
        ("BitNetForCausalLM",),
        all_full,
        has_inner_norms=True,
        names={
            "self_attn.inner_norm": "self_attn.attn_sub_norm",
            "mlp.inner_norm": "mlp.ffn_sub_norm",
        },
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    )
}
