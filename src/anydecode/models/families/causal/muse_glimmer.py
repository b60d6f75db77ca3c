"""Muse Glimmer and Muse Spark (Meta, 2026), their language models: gated attention, which knows
positions in layers with windows only, norms of queries and keys without weights, and a norm of the
embeddings. Muse Spark has gates of the sums of sublayers' inputs and outputs, and experts whose
inputs and outputs are normed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts, Scales
from anydecode.models.families.patterns import (
    FULL,
    LAYER_THETA,
    SLIDING,
    listed_dense_layers,
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


_GLIMMER = Family(
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


def _spark_layers(config: Config) -> dict[str, Any]:
    """The rotary embeddings and the experts of layers; the router's products have the factor of
    the logits."""
    factor = number("output_multiplier", config["output_multiplier"])
    return {**own_thetas(config), **listed_dense_layers(config), "router_factor": factor}


_SPARK = replace(
    _GLIMMER,
    architectures=("MuseSparkForConditionalGeneration",),
    derived=_spark_layers,
    has_residual_gates=True,
    has_head_norm=True,
    keys={"moe_hidden_size": ("moe_latent_size",)},
    moe=MixtureOfExperts(scoring="sigmoid", has_selection_bias=True, norms_outputs=True),
    defaults={
        **_GLIMMER.defaults,
        "head_dim": 64,
        "rope_theta": 500_000.0,
        "qk_scale_factor": 5.4730064863875,
        "output_multiplier": 0.1767766952966369,
        "moe_latent_size": 4096,
    },
)

FAMILIES = {"muse_glimmer_text": _GLIMMER, "muse_spark_text": _SPARK}
