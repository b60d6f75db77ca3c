"""Mistral Large 4 (Mistral AI, 2026): latent attention to positions that an indexer selects, whose
queries have factors that depend on the position, and no rotary embedding in every fourth layer.
Layers may share latents, and what an indexer has selected.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import (
    FULL,
    indexer_types,
    listed_dense_layers,
    rope_flags,
)
from anydecode.models.families.values import Config, int_value, num_layers
from anydecode.models.limits import refusal

_KEYS = ("qk_nope_head_dim", "qk_rope_head_dim")
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}


def _layers(config: Config) -> dict[str, Any]:
    """The kinds of layers. Those without a rotary embedding have longer keys without one. Configs
    of `transformers` call attention "indexed_attention"."""
    types = [FULL] * num_layers(config)
    key, rotary = (int_value(config, name) for name in _KEYS)
    own = dict(zip(_KEYS, (key + rotary, 0), strict=True))
    has_rope = rope_flags(config, types)
    if config.get("q_lora_rank") is not None:
        raise refusal("q_lora_rank", config["q_lora_rank"], "null")
    return {
        "layer_types": types,
        "indexer_types": indexer_types(config),
        "per_layer_config": {str(i): own for i, is_rotary in enumerate(has_rope) if not is_rotary},
        "has_rank_eps": True,
        "norm_topk_prob": True,
        **listed_dense_layers(config),
    }


FAMILIES = {
    "mistral_large4_text": family_like(
        "deepseek_v3",
        "MistralLarge4ForConditionalGeneration",
        model_types=("mistral_large4",),
        has_indexer=True,
        has_query_scale=True,
        has_learned_rope=True,
        rope_layers=rope_flags,
        derived=_layers,
        moe=MixtureOfExperts(shared_module="shared_experts"),
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_parameters": _YARN,
            "q_lora_rank": None,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "indexer_rope_interleave": True,
            "first_k_dense_replace": 1,
            "final_logit_softcapping": 30.0,
        },
    )
}
