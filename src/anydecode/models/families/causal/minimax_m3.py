"""MiniMax-M3 (MiniMax, 2026): MiniMax-M2 with norms of single heads, shared experts and clamped
activations.

An indexer selects the blocks of positions that a row attends to. As long as there are no more than
it selects, a row attends to all of them. Contexts are limited to that length, and the indexer is
not read.
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


def _layers(config: Config) -> dict[str, Any]:
    """The sizes of its MLPs, and how many positions sparse attention selects."""
    sparse = mapping_value(config, "sparse_attention_config")
    size = int_value(sparse, "sparse_block_size", int_value(config, "index_block_size", 128))
    count = int_value(sparse, "sparse_topk_blocks", int_value(config, "index_topk_blocks", 16))
    found = {
        "layer_types": [FULL] * num_layers(config),
        "num_selected_positions": size * count,
        "hidden_act": "silu",
        **_dense_layers(config),
        **rotary_size(config),
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
        dense_positions="num_selected_positions",
        defaults={"head_dim": 128, "rope_theta": 5e6, "routed_scaling_factor": 2.0},
        moe=MixtureOfExperts(
            scoring="sigmoid",
            has_selection_bias=True,
            shared_module="shared_experts",
            shared_size="shared_intermediate_size",
        ),
    )
}
