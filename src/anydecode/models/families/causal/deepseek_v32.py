"""DeepSeek-V3.2 (DeepSeek-AI, 2025, arXiv:2512.02556) and GLM-5 (Z.ai, 2026).

An indexer selects the positions that a row attends to, `index_topk` of those before it. Some layers
of GLM-5.2 attend to the positions that an earlier layer has selected (arXiv:2603.12201).
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import FULL, indexer_types, listed_dense_layers
from anydecode.models.families.values import Config, num_layers


def _layers(config: Config) -> dict[str, Any]:
    """Configs of `transformers` call the layers "indexed_attention"."""
    return {
        "layer_types": [FULL] * num_layers(config),
        "indexer_types": indexer_types(config),
        **listed_dense_layers(config),
    }


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
