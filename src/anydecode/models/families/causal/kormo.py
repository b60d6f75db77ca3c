"""KORMo (KORMo team, 2025, arXiv:2510.09426): Llama, whose norms have other names."""

from __future__ import annotations

from anydecode.models.families.like import family_like

FAMILIES = {
    "kormo": family_like(
        "llama",
        "KORMoForCausalLM",
        names={
            "input_layernorm": "pre_attention_layernorm",
            "post_attention_layernorm": "pre_mlp_layernorm",
        },
    )
}
