"""Granite with windows and attention sinks (IBM, 2026), dense and with experts."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import FULL, SLIDING
from anydecode.models.families.values import Config, num_layers
from anydecode.models.limits import number, refusal

_KEY = "layer_rope_theta"


def _full_every_fourth(config: Config) -> list[str]:
    """The first layer of every four attends to all positions."""
    return [SLIDING if layer % 4 else FULL for layer in range(num_layers(config))]


def _thetas(config: Config) -> list[float] | None:
    """The base of each layer's rotary frequencies, 0 for none; None: one for all."""
    thetas, count = config.get(_KEY), num_layers(config)
    if thetas is None:
        return None
    if not isinstance(thetas, list) or len(thetas) < count:
        raise refusal(_KEY, thetas, f"a list of {count} numbers")
    return [theta if theta == 0 else number(_KEY, theta) for theta in thetas[:count]]


def _rope_layers(config: Config, layer_types: list[str]) -> list[bool]:
    thetas = _thetas(config)
    return [True] * len(layer_types) if thetas is None else [theta != 0 for theta in thetas]


def _layers(config: Config) -> dict[str, Any]:
    thetas = _thetas(config)
    if thetas is None:
        return {}
    own = {str(layer): {"own_rope_theta": theta} for layer, theta in enumerate(thetas) if theta}
    return {"per_layer_config": own}


FAMILIES = {
    model_type: family_like(
        like,
        architecture,
        layer_types=_full_every_fourth,
        has_sinks=True,
        rope_layers=_rope_layers,
        derived=_layers,
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
