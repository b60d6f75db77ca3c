"""EAGLE-3 drafters (Li et al., arXiv:2503.01840) in GGUF files, in the layout of llama.cpp.

Beside the names of Llama, a file has `fc.weight`, `blk.0.attn_norm_2.weight` (the norm of the
states), and `d2t`, the token of each row of the head. The tokenizer is the target's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.limits import MAX_SIZE, integer
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.models.loading.gguf_rope import deinterleaved
from anydecode.models.loading.lazy import LazyTensors, Reader

ARCHITECTURE = "eagle3"
#: Tensors by their Hugging Face names.
TENSORS = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
}
#: The token of each row of the head.
TOKENS = "d2t"
#: The keys of the layers that are read, by their inputs; the second is that of older files.
TAPS = ("target_layers", "extract_layers")
#: Keys of the metadata by those of the config.
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "target_hidden_size": "target_hidden_size",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
#: Those that are no integers.
NUMBERS = ("rms_norm_eps", "rope_theta")


def load_eagle3(file: GGUFFile) -> Checkpoint:
    """The drafter of a file, as a checkpoint in the layout of EAGLE-3.

    Raises:
        CheckpointError: A key or a tensor is missing, invalid or unsupported.
    """
    config, path = _config(file), file.path
    names = {stored: name for name, stored in TENSORS.items()}
    readers: dict[str, Reader] = {}
    for info in file.tensors.values():
        module, _, leaf = info.name.rpartition(".")
        if info.name == TOKENS:
            readers[TOKENS] = partial(_offsets, file)
            continue
        if leaf != "weight" or module not in names:
            raise CheckpointError(f"{path}: tensor {info.name!r} is unknown in {ARCHITECTURE}")
        name = f"{names[module]}.weight"
        readers[name] = partial(file.view, info, names[module])
        for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if names[module].endswith(part):
                readers[name] = partial(deinterleaved, readers[name], config[key])
    return Checkpoint(path.stem, path, config, LazyTensors(path, readers))


def _config(file: GGUFFile) -> dict[str, Any]:
    def value(key: str, default: Any = None) -> Any:
        name = f"{ARCHITECTURE}.{key}"
        if (found := file.metadata.get(name, default)) is None:
            raise CheckpointError(f"{file.path}: metadata {name} is missing")
        return found

    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    for name, key in KEYS.items():
        if name in NUMBERS:
            config[name] = value(key, 10000.0 if name == "rope_theta" else None)
            continue
        default = None
        if name == "head_dim":
            default = max(1, config["hidden_size"] // config["num_attention_heads"])
        label = f"{file.path}: metadata {ARCHITECTURE}.{key}"
        config[name] = integer(label, value(key, default), 1, MAX_SIZE)
    if (scaling := value("rope.scaling.type", "none")) != "none":
        raise CheckpointError(f"{file.path}: rope scaling {scaling!r} is not supported")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    config["vocab_size"] = value("vocab_size", len(tokens) if isinstance(tokens, list) else None)
    if TOKENS in file.tensors:
        config["draft_vocab_size"] = file.tensors[TOKENS].shape[0]
    for flag in ("norm_before_residual", "norm_before_fc"):
        config[flag] = value(flag, False)
    if config["num_hidden_layers"] != 1:
        raise CheckpointError(
            f"{file.path}: metadata {ARCHITECTURE}.block_count is {config['num_hidden_layers']};"
            " supported is 1"
        )
    taps = value(TAPS[0], file.metadata.get(f"{ARCHITECTURE}.{TAPS[1]}"))
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": taps}
    return config


def _offsets(file: GGUFFile) -> np.ndarray:
    """The tokens of the head's rows as EAGLE-3 stores them: less the number of the row."""
    tokens = file.read(TOKENS)
    assert not isinstance(tokens, Weight)
    return tokens.astype(np.int64).ravel() - np.arange(tokens.size)
