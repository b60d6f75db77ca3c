"""DeepSeek-V3.2 (DeepSeek-AI, 2025, arXiv:2512.02556) and GLM-5 (Z.ai, 2026).

An indexer selects the positions that a row attends to, `index_topk` of those before it. As long as
there are no more than that, a row attends to all of them, as in DeepSeek-V3. Contexts are limited
to that length, and the indexer is not read.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import FULL, listed_dense_layers
from anydecode.models.families.values import Config, num_layers


def _layers(config: Config) -> dict[str, Any]:
    """Configs of `transformers` call the layers "indexed_attention"."""
    return {"layer_types": [FULL] * num_layers(config), **listed_dense_layers(config)}


FAMILIES = {
    model_type: family_like(
        "deepseek_v3",
        architecture,
        derived=_layers,
        dense_positions="index_topk",
        defaults={"index_topk": 2048, "first_k_dense_replace": 3, **defaults},
    )
    for model_type, architecture, defaults in (
        ("deepseek_v32", "DeepseekV32ForCausalLM", {"routed_scaling_factor": 2.5}),
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM", {"rms_norm_eps": 1e-5}),
    )
}
