"""LFM3 (Liquid AI, 2026): LFM2 with norms behind its sublayers, with windows in some layers of
attention, and with a gate for each head."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import FULL, SLIDING
from anydecode.models.families.table import FAMILIES as OTHERS
from anydecode.models.families.values import Config, bool_value, mapping_value, num_layers
from anydecode.models.limits import refusal


def _layer_types(config: Config) -> list[str]:
    """Of every four layers, the third attends to all positions and the first, but for that of the
    model, has a window."""
    kinds = {0: SLIDING, 2: FULL}
    types = [kinds.get(layer % 4, "conv") for layer in range(num_layers(config))]
    return ["conv", *types[1:]]


def _rope(config: Config) -> dict[str, Any]:
    if not bool_value(config, "use_sandwich_norm", True):
        raise refusal("use_sandwich_norm", False, "true")
    rope = {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    }
    return {"rope_parameters": mapping_value(config, "rope_parameters") or rope}


FAMILIES = {
    "lfm3": family_like(
        "lfm2",
        "Lfm3ForCausalLM",
        layer_types=_layer_types,
        norms="both",
        attention_gate="sigmoid",
        gates_heads=True,
        derived=_rope,
        names={
            "norm": "embedding_norm",
            "input_layernorm": "operator_norm",
            "post_attention_layernorm": "post_operator_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffn_norm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        },
        defaults={
            **OTHERS["lfm2"].defaults,
            "head_dim": 128,
            "conv_L_cache": 7,
            "sliding_window": 256,
        },
    )
}
