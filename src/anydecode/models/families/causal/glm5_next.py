"""GLM-5.3-Flash (Z.ai, 2026): Kimi delta attention in three of four layers, in the others latent
attention to blocks of positions that an indexer selects, experts, and hyper-connections.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import FULL, indexer_types, listed_dense_layers, no_rope
from anydecode.models.families.recurrent import LIMITED_DELTA
from anydecode.models.families.values import (
    Config,
    bool_value,
    int_value,
    list_value,
    mapping_value,
    num_layers,
    value_or,
)
from anydecode.models.limits import refusal

_LINEAR = "linear_attention"


def _layer_types(config: Config) -> list[str]:
    """Attention in every fourth layer."""
    return [_LINEAR if layer % 4 != 3 else FULL for layer in range(num_layers(config))]


def _layers(config: Config) -> dict[str, Any]:
    """The kinds of layers, and the sizes of the recurrence, which published configs have in an
    object of their own too. Configs of `transformers` call attention "indexed_attention"."""
    if not bool_value(config, "index_kpool_always_select_tail", True):
        raise refusal("index_kpool_always_select_tail", False, "true")
    if int_value(config, "qk_rope_head_dim", 0, low=0):
        raise refusal("qk_rope_head_dim", config["qk_rope_head_dim"], "0")
    types = list_value(config, "layer_types", str) or _layer_types(config)
    linear = mapping_value(config, "linear_attn_config")
    low = value_or(linear, "gate_lower_bound", config["linear_lower_bound"])
    if low is None and linear and bool_value(linear, "safe_gate", True):
        low = -5.0
    return {
        "layer_types": [FULL if kind == "indexed_attention" else kind for kind in types],
        "indexer_types": indexer_types(config),
        "has_block_keys": True,
        "has_mean_stream": True,
        "has_rank_eps": True,
        "linear_num_heads": value_or(linear, "num_heads", config["linear_num_heads"]),
        "linear_head_dim": value_or(linear, "head_dim", config["linear_head_dim"]),
        "linear_conv_kernel_dim": value_or(
            linear, "short_conv_kernel_size", config["linear_conv_kernel_dim"]
        ),
        "kda_safe_gate": low is not None,
        "kda_lower_bound": low,
        **listed_dense_layers(config),
    }


FAMILIES = {
    "glm5_next_text": Family(
        ("Glm5NextForConditionalGeneration",),
        _layer_types,
        model_types=("glm5_next",),
        has_latent_attention=True,
        has_indexer=True,
        has_hyper_connections=True,
        has_limited_swiglu=True,
        recurrent=LIMITED_DELTA,
        rope_layers=no_rope,
        derived=_layers,
        keys={"index_kpool": ("index_block_size",)},
        defaults={
            "linear_num_heads": 64,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "linear_lower_bound": -5.0,
            "first_k_dense_replace": 3,
            "rms_norm_eps": 1e-5,
            "qk_rope_head_dim": 0,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 2048,
            "index_block_size": 16,
            "routed_scaling_factor": 2.5,
            "swiglu_limit": 10.0,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
        },
        moe=MixtureOfExperts(
            scoring="sigmoid", has_selection_bias=True, shared_module="shared_experts"
        ),
    )
}
