"""ARWKV (Yueyu et al., 2025, arXiv:2501.15570): Qwen2 whose attention is the time mixing of RWKV-7,
mostly without gates and norms of heads. Its names are converted when a folder is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydecode.models.families.rwkv import rwkv7_sizes
from anydecode.models.families.table import FAMILIES as TABLE
from anydecode.models.families.values import Config, num_layers, value_or
from anydecode.models.limits import number, refusal


def _sizes(config: Config) -> dict[str, Any]:
    if value_or(config, "wkv_version", 7) != 7:
        raise refusal("wkv_version", config["wkv_version"], "7")
    layers = value_or(config, "wkv_layers", "full")
    if layers != "full" and layers != list(range(num_layers(config))):
        raise refusal("wkv_layers", layers, "'full': layers with attention are not supported")
    divisor = number("head_size_divisor", value_or(config, "head_size_divisor", 8))
    eps = value_or(config, "group_norm_eps", 1e-5 * divisor**2)
    return {**rwkv7_sizes(config), "has_gated_mlp": True, "group_norm_eps": eps}


FAMILIES = {
    "arwkv7": replace(
        TABLE["rwkv7"],
        architectures=("RwkvHybridForCausalLM",),
        model_types=("rwkv_hybrid",),
        derived=_sizes,
        norm="rms",
        has_norm_bias=False,
        has_embedding_norm=False,
        mlp="gated",
        keys={
            "head_size": ("head_dim",),
            "wkv_has_gate": ("has_gate",),
            "wkv_has_group_norm": ("has_head_norms",),
        },
        names={},
        defaults={
            "num_attention_heads": 1,
            "decay_low_rank_dim": 64,
            "a_low_rank_dim": 64,
            "v_low_rank_dim": 32,
            "gate_low_rank_dim": 128,
        },
    )
}
