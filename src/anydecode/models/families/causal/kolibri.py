"""Kolibri 1 (Aleph Alpha, 2026): experts beside a shared one, layers with windows, and norms on
both sides of each sublayer."""

from __future__ import annotations

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import full_every_nth, rope_if_sliding

FAMILIES = {
    "kolibri1": Family(
        ("Kolibri1ForCausalLM",),
        full_every_nth,
        norms="both",
        qk_norm="head",
        rope_layers=rope_if_sliding,
        moe=MixtureOfExperts(
            scoring="sigmoid",
            by_logits=True,
            has_selection_bias=True,
            shared_module="shared_experts",
            shared_size="shared_expert_intermediate_size",
        ),
        names={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        defaults={"head_dim": 128, "sliding_window": 513, "sliding_window_pattern": 5},
    )
}
