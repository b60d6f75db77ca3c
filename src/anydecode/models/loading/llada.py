"""Converts LLaDA's layout (GSAI-ML/LLaDA-8B, derived from OLMo's) to the Hugging Face layout of
Llama, and that of RemeDi, which has side layers between LLaDA's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from anydecode.errors import CheckpointError
from anydecode.models.families.diffusion.remedi import BEFORE_SIDE, SIDE_LAYERS
from anydecode.models.limits import MAX_LAYERS, ConfigError, integer

T = TypeVar("T")

_KEYS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "activation_type": "hidden_act",
    "weight_tying": "tie_word_embeddings",
}
#: Options of the architecture, and the values that LLaDA uses.
_FIXED: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "block_group_size": (1,),
    "block_type": ("llama",),
    "clip_qkv": (None,),
    "input_emb_norm": (False,),
    "layer_norm_type": ("rms", "gemma_rms"),
    "rope": (True,),
    "scale_logits": (False,),
}
_OUTER = {
    "model.transformer.wte": "model.embed_tokens",
    "model.transformer.ln_f": "model.norm",
    "model.transformer.ff_out": "lm_head",
    "model.ln_f_upm": "model.unmasking.norm",
    "model.linear_confidence": "model.unmasking.head",
}
#: The modules of a layer -> their names in Llama's layout.
INNER_NAMES = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
_LAYER = re.compile(r"model\.(transformer\.blocks|blocks_upm)\.(\d+)\.(\w+)\.(weight|bias)")
_SIDE_OUTPUT = re.compile(r"model\.backprop_(linear|norm)s\.(\d+)\.(weight|bias)")


def is_llada(config: dict[str, Any]) -> bool:
    """Whether a config.json is written in this layout."""
    return config.get("model_type") in ("llada", "RemeDi") and "d_model" in config


def to_hf_layout(
    config: dict[str, Any], readers: dict[str, Callable[[], T]]
) -> tuple[dict[str, Any], dict[str, Callable[[], T]]]:
    """Config and tensors in the Hugging Face layout of Llama.

    Raises:
        CheckpointError: An option has a value that LLaDA does not use.
    """
    for key, allowed in _FIXED.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"{key} {config[key]!r} is not supported in a llada config")
    hf_config = {_KEYS.get(key, key): value for key, value in config.items()}
    hf_config["vocab_size"] = config.get("embedding_size") or config.get("vocab_size")
    hf_config["num_key_value_heads"] = config.get("n_kv_heads") or config.get("n_heads")
    hf_config["rms_norm_eps"] = config.get("rms_norm_eps") or config.get("layer_norm_eps") or 1e-5
    if hf_config.get("intermediate_size") is None and hf_config.get("hidden_size"):
        ratio = integer("mlp_ratio", config.get("mlp_ratio", 4))
        hf_config["intermediate_size"] = ratio * integer("d_model", hf_config["hidden_size"])
    if config["model_type"] == "llada":
        return hf_config, {_hf_name(name): reader for name, reader in readers.items()}
    count = integer("n_layers", hf_config.get("num_hidden_layers"), 1, MAX_LAYERS)
    count += sum(layer < count for layer in BEFORE_SIDE)
    hf_config["num_hidden_layers"] = count
    renamed = {_remedi_name(name): reader for name, reader in readers.items()}
    unused = tuple(f"model.layers.{layer}." for layer in SIDE_LAYERS if layer >= count)
    return hf_config, {name: renamed[name] for name in renamed if not name.startswith(unused)}


def _remedi_name(name: str) -> str:
    if layer := _LAYER.fullmatch(name):
        number, inner = int(layer[2]), INNER_NAMES.get(layer[3], layer[3])
        index = number + sum(before < number for before in BEFORE_SIDE)
        if layer[1] == "blocks_upm":
            index = _side_layer(name, number)
        return f"model.layers.{index}.{inner}.{layer[4]}"
    if output := _SIDE_OUTPUT.fullmatch(name):
        inner = {"linear": "projection", "norm": "norm"}[output[1]]
        return f"model.layers.{_side_layer(name, int(output[2]))}.side.{inner}.{output[3]}"
    return _hf_name(name)


def _side_layer(name: str, number: int) -> int:
    if number >= len(SIDE_LAYERS):
        raise CheckpointError(f"tensor {name}: there are {len(SIDE_LAYERS)} side layers")
    return SIDE_LAYERS[number]


def _hf_name(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[1] == "transformer.blocks" and layer[3] in INNER_NAMES:
        return f"model.layers.{layer[2]}.{INNER_NAMES[layer[3]]}.{layer[4]}"
    stem, _, kind = name.rpartition(".")
    return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name
