"""DeepSeek-V3.2 (DeepSeek-AI, 2025, arXiv:2512.02556) and GLM-5 (Z.ai, 2026).

An indexer selects the positions that a row attends to, `index_topk` of those before it. Some layers
of GLM-5.2 attend to the positions that an earlier layer has selected (arXiv:2603.12201).
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import FULL, listed_dense_layers
from anydecode.models.families.values import Config, int_value, list_value, num_layers
from anydecode.models.limits import refusal

_TYPES = {"F": "full", "S": "shared"}


def _layers(config: Config) -> dict[str, Any]:
    """Configs of `transformers` call the layers "indexed_attention"."""
    return {
        "layer_types": [FULL] * num_layers(config),
        "indexer_types": _indexer_types(config),
        **listed_dense_layers(config),
    }


def _indexer_types(config: Config) -> list[str]:
    """Which layers have an indexer, "full": those of a list or a pattern, or every
    `index_topk_freq`-th one after the first `index_skip_topk_offset` - 1."""
    types, pattern = list_value(config, "indexer_types", str), config.get("index_topk_pattern")
    if types is not None:
        return types
    if isinstance(pattern, str) and set(pattern) <= set(_TYPES):
        return [_TYPES[letter] for letter in pattern]
    if pattern is not None:
        raise refusal("index_topk_pattern", pattern, "a text of F and S")
    step = int_value(config, "index_topk_freq", 1)
    first = int_value(config, "index_skip_topk_offset", 2, low=0) - 1
    kinds = ("full", "shared")
    return [kinds[max(layer - first, 0) % step > 0] for layer in range(num_layers(config))]


FAMILIES = {
    model_type: family_like(
        "deepseek_v3",
        architecture,
        derived=_layers,
        has_indexer=True,
        defaults={
            "index_topk": 2048,
            "index_head_dim": 128,
            "first_k_dense_replace": 3,
            **defaults,
        },
    )
    for model_type, architecture, defaults in (
        (
            "deepseek_v32",
            "DeepseekV32ForCausalLM",
            {"routed_scaling_factor": 2.5, "index_n_heads": 64},
        ),
        (
            "glm_moe_dsa",
            "GlmMoeDsaForCausalLM",
            {"rms_norm_eps": 1e-5, "index_n_heads": 32, "indexer_rope_interleave": True},
        ),
    )
}
