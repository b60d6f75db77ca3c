"""Granite with windows and attention sinks (IBM, 2026), dense and with experts."""

from __future__ import annotations

from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import FULL, SLIDING, own_thetas, rope_if_theta
from anydecode.models.families.values import Config, num_layers


def _full_every_fourth(config: Config) -> list[str]:
    """The first layer of every four attends to all positions."""
    return [SLIDING if layer % 4 else FULL for layer in range(num_layers(config))]


FAMILIES = {
    model_type: family_like(
        like,
        architecture,
        layer_types=_full_every_fourth,
        has_sinks=True,
        rope_layers=rope_if_theta,
        derived=own_thetas,
        defaults={"sliding_window": 128, "rms_norm_eps": eps, **defaults},
    )
    for model_type, like, architecture, eps, defaults in (
        ("granite_swa", "granite", "GraniteSWAForCausalLM", 1e-5, {"tie_word_embeddings": True}),
        (
            "granitemoe_swa",
            "granitemoeshared",
            "GraniteMoeSWAForCausalLM",
            1e-6,
            {"shared_intermediate_size": 0},
        ),
    )
}
