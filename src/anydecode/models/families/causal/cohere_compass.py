"""Cohere Compass (Cohere, 2026): Command R7B with another layout of rotary pairs. Which types of
layers have a rotary position embedding, the config says."""

from __future__ import annotations

from anydecode.models.families.family import Scales
from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import all_full
from anydecode.models.families.values import Config, mapping_value, value_or
from anydecode.models.limits import number


def _rope_if_given(config: Config, layer_types: list[str]) -> list[bool]:
    """In the layers of the types whose parameters are not null."""
    parameters = mapping_value(config, "rope_parameters")
    return [kind not in parameters or parameters[kind] is not None for kind in layer_types]


def _scales(config: Config) -> Scales:
    return Scales(logits=number("logit_scale", value_or(config, "logit_scale", 1.0)))


FAMILIES = {
    "cohere_compass_text": family_like(
        "cohere2",
        "CohereCompassForCausalLM",
        layer_types=all_full,
        interleaved_rope=False,
        rope_layers=_rope_if_given,
        scales=_scales,
        defaults={"tie_word_embeddings": True, "sliding_window": 4096},
    )
}
