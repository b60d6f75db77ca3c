"""MiniMax-M3 (MiniMax, 2026): MiniMax-M2 with norms of single heads, shared experts and clamped
activations.

An indexer selects the blocks of positions that a row attends to, for each key head by itself.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import MixtureOfExperts
from anydecode.models.families.like import family_like
from anydecode.models.families.patterns import FULL, dense_layers
from anydecode.models.families.values import (
    Config,
    int_value,
    list_value,
    mapping_value,
    num_layers,
    rotary_size,
)
from anydecode.models.limits import refusal

_FREQUENCY = "moe_layer_freq"
#: The type of layers with an indexer.
_SPARSE = "minimax_m3_sparse"


def _dense_layers(config: Config) -> dict[str, Any]:
    """The layers without experts."""
    flags, count = list_value(config, _FREQUENCY, int), num_layers(config)
    if config.get("mlp_layer_types") is not None:
        return dense_layers(config)
    if flags is None:
        return {}
    if len(flags) < count:
        raise refusal(_FREQUENCY, flags, f"0 or 1 for each of {count} layers")
    dense = [layer for layer in range(count) if not flags[layer]]
    return {"mlp_only_layers": dense, _FREQUENCY: None}


def _indexers(config: Config) -> dict[str, Any]:
    """The sizes of the indexers, and which layers have one."""
    sparse, count = mapping_value(config, "sparse_attention_config"), num_layers(config)
    found: dict[str, Any] = {
        key: int_value(sparse, own, int_value(config, key, default, low=low), low=low)
        for key, own, default, low in (
            ("index_n_heads", "sparse_num_index_heads", 4, 1),
            ("index_head_dim", "sparse_index_dim", 128, 1),
            ("index_block_size", "sparse_block_size", 128, 1),
            ("index_topk_blocks", "sparse_topk_blocks", 16, 1),
            ("index_local_blocks", "sparse_local_block", 1, 0),
        )
    }
    found["index_topk"] = found["index_block_size"] * found["index_topk_blocks"]
    types = list_value(config, "layer_types", str)
    flags = list_value(sparse, "sparse_attention_freq", int) or [0] * count
    if types is None and len(flags) < count:
        raise refusal("sparse_attention_freq", flags, f"0 or 1 for each of {count} layers")
    has_indexer = flags if types is None else [kind == _SPARSE for kind in types]
    names = ["full" if one else "none" for one in has_indexer]
    return {**found, "indexer_types": list_value(config, "indexer_types", str) or names}


def _layers(config: Config) -> dict[str, Any]:
    """The sizes of its MLPs, and its indexers."""
    found = {
        "layer_types": [FULL] * num_layers(config),
        "hidden_act": "silu",
        **_dense_layers(config),
        **rotary_size(config),
        **_indexers(config),
    }
    if "moe_intermediate_size" not in config:
        found["moe_intermediate_size"] = int_value(config, "intermediate_size")
        found["intermediate_size"] = int_value(config, "dense_intermediate_size")
    return found


FAMILIES = {
    "minimax_m3_vl_text": family_like(
        "minimax_m2",
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        is_own=None,
        qk_norm="head",
        norm_offset=1.0,
        has_clamped_swiglu=True,
        derived=_layers,
        has_indexer=True,
        defaults={"head_dim": 128, "rope_theta": 5e6, "routed_scaling_factor": 2.0},
        moe=MixtureOfExperts(
            scoring="sigmoid",
            has_selection_bias=True,
            shared_module="shared_experts",
            shared_size="shared_intermediate_size",
        ),
    )
}
