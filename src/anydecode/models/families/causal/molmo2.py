"""The language models of Molmo 2 (Ai2, 2025): Qwen3, or OLMo 2. Their layout is converted when it
is loaded."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import all_full
from anydecode.models.families.rope import rope_type
from anydecode.models.families.values import (
    Config,
    bool_value,
    list_value,
    mapping_value,
    num_layers,
)
from anydecode.models.limits import refusal


def _is_post_normed(config: Config) -> bool:
    return config.get("model_type") == "molmo2_text" and bool_value(config, "norm_after")


def _checked(config: Config) -> dict[str, Any]:
    """Refuse other norms of queries and keys than those of the published models, and scalings of
    the rotary embeddings of some layers."""
    kind = "olmo" if bool_value(config, "norm_after") else "qwen3"
    if config.get("qk_norm_type", kind) != kind:
        raise refusal("qk_norm_type", config["qk_norm_type"], repr(kind))
    scaled = list_value(config, "rope_scaling_layers", int)
    rope = mapping_value(config, "rope_scaling") or mapping_value(config, "rope_parameters")
    if scaled is not None and len(scaled) < num_layers(config) and rope_type(rope) != "default":
        raise refusal("rope_scaling_layers", scaled, "all layers")
    return {}


_KEYS = {"layer_norm_eps": ("rms_norm_eps",)}
FAMILIES = {
    "molmo2_text": family_like(
        "qwen3",
        "Molmo2ForConditionalGeneration",
        layer_types=all_full,
        derived=_checked,
        keys=_KEYS,
        output_bias=False,
    ),
    "molmo2_o_text": family_like(
        "olmo2",
        "Molmo2ForConditionalGeneration",
        model_types=("molmo2_text",),
        is_own=_is_post_normed,
        derived=_checked,
        keys=_KEYS,
        output_bias=False,
        names={
            "post_attention_layernorm": "input_layernorm",
            "post_feedforward_layernorm": "post_attention_layernorm",
        },
        defaults={"head_dim": 128},
    ),
}
