"""AFMoE, the architecture of Trinity (Arcee AI, 2025): gated attention, which knows positions in
layers with windows only, and experts behind dense layers."""

from __future__ import annotations

import math

from anydecode.models.families.family import Family, MixtureOfExperts, Scales
from anydecode.models.families.patterns import full_every_nth, rope_if_sliding
from anydecode.models.families.values import Config, bool_value, int_value


def _scales(config: Config) -> Scales:
    if not bool_value(config, "mup_enabled"):
        return Scales()
    return Scales(embedding=math.sqrt(int_value(config, "hidden_size")))


FAMILIES = {
    "afmoe": Family(
        ("AfmoeForCausalLM",),
        full_every_nth,
        norms="both",
        qk_norm="head",
        rope_layers=rope_if_sliding,
        attention_gate="sigmoid",
        scales=_scales,
        keys={
            "global_attn_every_n_layers": ("sliding_window_pattern",),
            "num_dense_layers": ("first_k_dense_replace",),
            "num_shared_experts": ("n_shared_experts",),
            "route_scale": ("routed_scaling_factor",),
        },
        names={
            "pre_feedforward_layernorm": "pre_mlp_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 1024,
            "sliding_window_pattern": 4,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
        },
        moe=MixtureOfExperts(
            scoring="sigmoid", has_selection_bias=True, shared_module="shared_experts"
        ),
    )
}
