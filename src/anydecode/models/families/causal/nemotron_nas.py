"""Llama-Nemotron (NVIDIA, 2025, arXiv:2505.00949): Llama whose layers an architecture search
(Puzzle, arXiv:2411.19146) has made smaller, each on its own; and DeciLM, whose classes it has."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.family import Family
from anydecode.models.families.patterns import FULL, MLP, all_full
from anydecode.models.families.values import (
    Config,
    bool_value,
    int_value,
    list_value,
    mapping_value,
    num_layers,
)
from anydecode.models.limits import ConfigError, number, refusal

#: Inner sizes of MLPs are multiples of this.
_MULTIPLE = 256


def _inner_size(config: Config, ffn: Config) -> int:
    """Two thirds of `ffn_mult` times the hidden size, rounded up."""
    factor = number("ffn_mult", ffn.get("ffn_mult"))
    size = int(2 * factor * int_value(config, "hidden_size") / 3)
    return -(-size // _MULTIPLE) * _MULTIPLE


def _part(block: Config, name: str, layer: int) -> dict[str, Any]:
    """The attention or the MLP of a layer's block."""
    part = mapping_value(block, name)
    if bool_value(part, "replace_with_linear"):
        raise ConfigError(f"layer {layer}: a linear layer in place of its {name} is not supported")
    if part.get("window_length") is not None or part.get("num_sink_tokens") is not None:
        raise ConfigError(f"layer {layer}: attention with a window is not supported")
    return part


def _layers(config: Config) -> dict[str, Any]:
    """Which sublayers each layer has, and their sizes."""
    blocks, count = list_value(config, "block_configs", dict), num_layers(config)
    heads = int_value(config, "num_attention_heads")
    if blocks is None:
        listed = list_value(config, "num_key_value_heads_per_layer", int)
        if listed is None:
            return {}
        sizes = {str(layer): {"num_key_value_heads": kv} for layer, kv in enumerate(listed)}
        return {"per_layer_config": sizes}
    if len(blocks) < count:
        raise refusal("the number of block_configs", len(blocks), f"one for each of {count} layers")
    types, sizes = [], {}
    for layer, block in enumerate(blocks[:count]):
        attention, ffn = (_part(block, name, layer) for name in ("attention", "ffn"))
        own: dict[str, Any] = {"has_mlp": not bool_value(ffn, "no_op")}
        if own["has_mlp"]:
            own["intermediate_size"] = _inner_size(config, ffn)
        types.append(MLP if bool_value(attention, "no_op") else FULL)
        if types[-1] == FULL:
            own["num_key_value_heads"] = heads // int_value(attention, "n_heads_in_group")
        sizes[str(layer)] = own
    return {"layer_types": types, "per_layer_config": sizes}


FAMILIES = {
    "nemotron-nas": Family(
        ("DeciLMForCausalLM",),
        all_full,
        model_types=("deci",),
        has_missing_sublayers=True,
        derived=_layers,
        defaults={"rms_norm_eps": 1e-5},
    )
}
