"""Muse Glimmer (Meta, 2026), its language model: gated attention, which knows positions in layers
with windows only, norms of queries and keys without weights, and a norm of the embeddings."""

from __future__ import annotations

from anydecode.models.families.family import Family, Scales
from anydecode.models.families.patterns import (
    FULL,
    LAYER_THETA,
    SLIDING,
    own_thetas,
    rope_if_theta,
)
from anydecode.models.families.values import Config, head_dim, num_layers, value_or
from anydecode.models.limits import number


def _layer_types(config: Config) -> list[str]:
    """Full attention in every fourth layer, counted from the last one."""
    count = num_layers(config)
    return [SLIDING if (count - 1 - layer) % 4 else FULL for layer in range(count)]


def _rope_layers(config: Config, layer_types: list[str]) -> list[bool]:
    """As listed, else the layers that have windows by default."""
    if config.get(LAYER_THETA) is not None:
        return rope_if_theta(config, layer_types)
    return [kind == SLIDING for kind in _layer_types(config)]


def _scales(config: Config) -> Scales:
    """The queries' factor behind their norm, and that of the logits."""
    queries, logits = (
        number(key, value_or(config, key, default))
        for key, default in (("qk_scale_factor", 3.87), ("output_multiplier", 1.0))
    )
    return Scales(attention=queries * head_dim(config) ** -0.5, logits=logits)


FAMILIES = {
    "muse_glimmer_text": Family(
        ("MuseGlimmerForConditionalGeneration",),
        _layer_types,
        norms="both",
        norm_offset=1.0,
        has_final_offset=False,
        has_embedding_norm=True,
        has_embedding_norm_weights=False,
        qk_norm="plain",
        attention_gate="sigmoid",
        rope_layers=_rope_layers,
        derived=own_thetas,
        scales=_scales,
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "post_norm_eps": 1e-8,
            "sliding_window": 2048,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.19611613513818404,
        },
    )
}
