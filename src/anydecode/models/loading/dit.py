"""Renames the config and the tensors of GIDD's and Duo's diffusion transformers
(dvruette/gidd-small-p_unif-0.1, s-sahoo/duo and others) to the Hugging Face layout."""

from __future__ import annotations

import re
from typing import Any

from anydecode.models.limits import ConfigError
from anydecode.models.loading.lazy import Reader

_KEYS = {
    "hidden_dim": "hidden_size",
    "n_blocks": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "model_length": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "cond_dim": "timestep_cond_dim",
}
_OUTER = {
    "vocab_embed.embedding": "model.embed_tokens.weight",
    "output_layer.norm_final.weight": "model.norm.weight",
    "output_layer.linear": "lm_head",
    "output_layer.adaLN_modulation": "model.modulation",
    "sigma_map.mlp.0": "model.time_embedding.first",
    "sigma_map.mlp.2": "model.time_embedding.second",
}
_INNER = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_out": "self_attn.o_proj",
    "mlp.0": "mlp.up_proj",
    "mlp.2": "mlp.down_proj",
    "adaLN_modulation": "modulation",
}
_LAYER = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")


def is_dit(config: dict[str, Any]) -> bool:
    """Whether a config.json is written in one of these layouts."""
    return config.get("model_type") in ("dit", "duo", "DUO") and (
        "timestep_cond_dim" in config or "cond_dim" in config
    )


def to_hf_layout(
    config: dict[str, Any], readers: dict[str, Reader]
) -> tuple[dict[str, Any], dict[str, Reader]]:
    """Config and tensors in the Hugging Face layout.

    Raises:
        ConfigError: The model is causal.
    """
    if config.get("causal"):
        raise ConfigError(f"causal=true is not supported in a {config['model_type']} config")
    hf_config = {_KEYS.get(key, key): value for key, value in config.items()}
    hf_config["model_type"] = str(config["model_type"]).lower()
    hf_config |= {"norm_epsilon": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
    hf_config |= {"attention_bias": False, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}
    if isinstance(hf_config.get("hidden_size"), int):
        hf_config["intermediate_size"] = 4 * hf_config["hidden_size"]
    hf_readers = {}
    for name, reader in readers.items():
        hf_name = _hf_name(name.removeprefix("backbone."))
        if hf_name is not None:
            hf_readers[hf_name] = reader
    return hf_config, hf_readers


def _hf_name(name: str) -> str | None:
    """The usual name of a tensor; None for what is computed anew (the rotary embedding)."""
    if name in _OUTER:
        return _OUTER[name]
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _INNER:
        return None
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"
