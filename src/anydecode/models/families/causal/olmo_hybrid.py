"""OLMo's hybrid (Allen Institute for AI, 2026): the gated delta rule in three of four layers, with
norms before both sublayers; attention with the norms of OLMo 3, and mostly without positions."""

from __future__ import annotations

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import FULL
from anydecode.models.families.recurrent import OLMO_DELTA
from anydecode.models.families.values import Config, mapping_value, num_layers

_LINEAR = "linear_attention"


def _full_every_fourth(config: Config) -> list[str]:
    """Full attention in every fourth layer, or in the last one if there are fewer."""
    count = num_layers(config)
    types = [_LINEAR if (layer + 1) % 4 else FULL for layer in range(count)]
    return types if FULL in types else [*types[:-1], FULL]


def _rope_if_based(config: Config, layer_types: list[str]) -> list[bool]:
    """A rotary position embedding if the config has a base for it, which published ones lack."""
    rope = mapping_value(config, "rope_parameters")
    has_base = rope.get("rope_theta", config.get("rope_theta")) is not None
    return [has_base] * len(layer_types)


FAMILIES = {
    "olmo_hybrid": Family(
        ("OlmoHybridForCausalLM",),
        _full_every_fourth,
        norms="post",
        qk_norm="full",
        rope_layers=_rope_if_based,
        recurrent=OLMO_DELTA,
        recurrent_norms="pre",
        other_names={
            "input_layernorm": "attention_layer_norm",
            "post_attention_layernorm": "feedforward_layer_norm",
        },
    )
}
