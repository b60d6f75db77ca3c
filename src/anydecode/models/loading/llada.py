"""Converts LLaDA's layout (GSAI-ML/LLaDA-8B, derived from OLMo's) to the Hugging Face layout of
Llama."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from anydecode.errors import CheckpointError
from anydecode.models.limits import integer

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
_LAYER = re.compile(r"model\.transformer\.blocks\.(\d+)\.(\w+)\.(weight|bias)")


def is_llada(config: dict[str, Any]) -> bool:
    """Whether a config.json is written in this layout."""
    return config.get("model_type") == "llada" and "d_model" in config


def to_hf_layout(
    config: dict[str, Any], readers: dict[str, Callable[[], T]]
) -> tuple[dict[str, Any], dict[str, Callable[[], T]]]:
    """Config and tensors in the Hugging Face layout of Llama.

    Raises:
        CheckpointError: An option has a value that LLaDA does not use.
    """
    for key, allowed in _FIXED.items():
        if config.get(key, allowed[0]) not in allowed:
            raise CheckpointError(f"{key} {config[key]!r} is not supported in a llada config")
    hf_config = {_KEYS.get(key, key): value for key, value in config.items()}
    hf_config["vocab_size"] = config.get("embedding_size") or config.get("vocab_size")
    hf_config["num_key_value_heads"] = config.get("n_kv_heads") or config.get("n_heads")
    hf_config["rms_norm_eps"] = config.get("rms_norm_eps") or config.get("layer_norm_eps") or 1e-5
    if hf_config.get("intermediate_size") is None and hf_config.get("hidden_size"):
        ratio = integer("mlp_ratio", config.get("mlp_ratio", 4))
        hf_config["intermediate_size"] = ratio * integer("d_model", hf_config["hidden_size"])
    return hf_config, {_hf_name(name): reader for name, reader in readers.items()}


def _hf_name(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[2] in INNER_NAMES:
        return f"model.layers.{layer[1]}.{INNER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name
