"""Flint (Recursive, 2026): Qwen3-MoE with attention sinks, sigmoid scores of experts, an MLP beside
them, and a rotary position embedding in layers with windows alone."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import FULL, SLIDING, rope_if_sliding
from anydecode.models.families.values import Config, num_layers


def _layer_types(config: Config) -> list[str]:
    count = num_layers(config)
    full = {0, count - 1, *range(1, count, 4)}
    return [FULL if layer in full else SLIDING for layer in range(count)]


def _dense_layers(config: Config) -> dict[str, Any]:
    """The layers without experts: the first two, unless the config lists them."""
    return {} if config.get("mlp_only_layers") is not None else {"mlp_only_layers": [0, 1]}


FAMILIES = {
    "flint": Family(
        ("FlintForCausalLM",),
        _layer_types,
        qk_norm="head",
        has_sinks=True,
        rope_layers=rope_if_sliding,
        derived=_dense_layers,
        moe=MixtureOfExperts(
            scoring="sigmoid",
            shared_module="shared_expert",
            shared_size="shared_expert_intermediate_size",
        ),
        defaults={"head_dim": 128, "sliding_window": 513},
    )
}
