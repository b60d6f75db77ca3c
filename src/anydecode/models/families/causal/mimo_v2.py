"""MiMo-V2-Flash (Xiaomi, 2026, arXiv:2601.02780) and the language model of MiMo-V2.5: layers with
windows and sinks have more key heads than those with full attention, and values are smaller than
keys."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import FULL, SLIDING, dense_layers
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


def _layer_types(config: Config) -> list[str]:
    """Windows where `hybrid_layer_pattern` has 1; without it full attention in the first layer and
    in every sixth."""
    pattern, count = list_value(config, "hybrid_layer_pattern", int), num_layers(config)
    if pattern is None:
        pattern = [int(layer > 0 and (layer + 1) % 6 > 0) for layer in range(count)]
    return [SLIDING if has_window else FULL for has_window in pattern[:count]]


def _dense_layers(config: Config) -> dict[str, Any]:
    """The layers without experts: those of which `moe_layer_freq` has 0."""
    flags, count = config.get("moe_layer_freq"), num_layers(config)
    if not isinstance(flags, list):
        return {} if config.get("mlp_only_layers") is not None else dense_layers(config)
    if len(flags) < count:
        raise refusal("moe_layer_freq", flags, f"0 or 1 for each of {count} layers")
    dense = [layer for layer in range(count) if not flags[layer]]
    return {"mlp_only_layers": dense, "moe_layer_freq": None}


def _layers(config: Config) -> dict[str, Any]:
    """What the two types of layers differ in."""
    types = list_value(config, "layer_types", str) or _layer_types(config)
    sliding: dict[str, Any] = {"has_sinks": bool_value(config, "add_swa_attention_sink_bias", True)}
    for key, default in (
        ("num_key_value_heads", 2 * int_value(config, "num_key_value_heads")),
        ("num_attention_heads", config.get("num_attention_heads")),
        ("head_dim", config.get("head_dim")),
        ("v_head_dim", config.get("v_head_dim")),
    ):
        sliding[key] = value_or(config, f"swa_{key}", default)
    full = {"has_sinks": bool_value(config, "add_full_attention_sink_bias")}
    rope = {
        kind: {
            "rope_theta": value_or(config, key, default),
            "partial_rotary_factor": value_or(config, "partial_rotary_factor", 0.334),
        }
        for kind, key, default in ((FULL, "rope_theta", 5e6), (SLIDING, "swa_rope_theta", 1e4))
    }
    found = {
        "layer_types": types,
        "per_layer_config": {
            str(layer): sliding if kind == SLIDING else full for layer, kind in enumerate(types)
        },
        "rope_parameters": mapping_value(config, "rope_parameters") or rope,
        **_dense_layers(config),
        "qkv_shards": _qkv_shards(config),
    }
    if config.get("sliding_window_size") is not None:  # without the row itself
        found["sliding_window"] = int_value(config, "sliding_window_size") + 1
    return found


def _qkv_shards(config: Config) -> int:
    """In how many equal parts the rows of a fused matrix are stored (MiMo-V2.5), each with some
    heads' queries, keys and values: the key heads of layers with full attention."""
    layout = config.get("attention_projection_layout")
    if layout not in (None, "split", "fused_qkv"):
        raise refusal("attention_projection_layout", layout, "split or fused_qkv")
    return int_value(config, "num_key_value_heads") if layout == "fused_qkv" else 1


FAMILIES = {
    "mimo_v2_flash": Family(
        ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
        _layer_types,
        model_types=("mimo_v2",),
        has_sinks=True,
        has_partial_rotary=True,
        output_bias=False,
        value_size="v_head_dim",
        derived=_layers,
        keys={"layernorm_epsilon": ("rms_norm_eps",)},
        defaults={
            "head_dim": 192,
            "v_head_dim": 128,
            "num_key_value_heads": 4,
            "sliding_window": 129,
            "attention_value_scale": 0.707,
            "rms_norm_eps": 1e-5,
        },
        moe=MixtureOfExperts(scoring="sigmoid", has_selection_bias=True),
    )
}
