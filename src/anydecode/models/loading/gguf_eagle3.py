"""EAGLE-3 drafters (Li et al., arXiv:2503.01840) in GGUF files, in the layout of llama.cpp.

Beside the names of Llama, a file has `fc.weight` and `blk.0.attn_norm_2.weight`, the norm of the
states.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from anydecode.errors import CheckpointError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.loading.gguf_drafters import (
    ROPE_FREQS,
    TAPS,
    TOKENS,
    config_of,
    head_offsets,
)
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.models.loading.gguf_keys import Keys
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
#: The key of the layers that are read in older files.
OLDER_TAPS = "extract_layers"


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
            readers[TOKENS] = partial(head_offsets, file)
            continue
        if info.name == ROPE_FREQS:
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
    keys = Keys(file)
    config = config_of(keys) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "target_hidden_size": keys.count("target_hidden_size"),
    }
    for flag in ("norm_before_residual", "norm_before_fc"):
        config[flag] = keys.get(flag, False)
    if config["num_hidden_layers"] != 1:
        raise CheckpointError(
            f"{keys.name('block_count')} is {config['num_hidden_layers']}; supported is 1"
        )
    older = keys.get(OLDER_TAPS, None)
    taps = keys.get(TAPS) if older is None else older
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": taps}
    return config
