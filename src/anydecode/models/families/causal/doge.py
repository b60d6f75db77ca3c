"""Doge (Shi et al., 2024, arXiv:2412.11834): attention with a bias for each key, and factors of the
sums' inputs. Beyond `keep_window_size` positions only those with the largest biases are seen, which
is not supported."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_sliding
from anydecode.models.families.values import Config, int_value


def _sizes(config: Config) -> dict[str, Any]:
    positions, seen = (
        int_value(config, key) for key in ("max_position_embeddings", "keep_window_size")
    )
    return {"max_position_embeddings": min(positions, seen)}


FAMILIES = {
    "doge": Family(
        ("DogeForCausalLM",),
        all_sliding,
        derived=_sizes,
        qk_norm="head",
        has_key_bias=True,
        residual_factors=("input_residual", "post_attention_residual"),
        experts_key="is_moe",
        context_limit="keep_window_size",
        defaults={"max_position_embeddings": 2048, "keep_window_size": 2048},
    )
}
