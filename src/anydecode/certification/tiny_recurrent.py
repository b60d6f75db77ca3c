"""State-space models and a hybrid with random weights, small enough for certificates. Six letters
are likely, so that texts repeat themselves with changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.certification.tiny import random_matrices
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.scripted import BYTE_VOCABULARY

_HIDDEN = 32
_WINDOW = 4


def mamba_checkpoint(seed: int = 0, layers: int = 2) -> Checkpoint:
    """Mamba in the layout of transformers: 64 channels with states of 8 numbers."""
    matrix = random_matrices(seed)
    inner, size, rank = 2 * _HIDDEN, 8, 4
    tensors = {
        "backbone.embeddings.weight": 2 * matrix(BYTE_VOCABULARY, _HIDDEN),
        "lm_head.bias": _letters(),
        "backbone.norm_f.weight": 1 + 0.1 * matrix(1, _HIDDEN)[0],
    }
    for name in (f"backbone.layers.{layer}" for layer in range(layers)):
        tensors |= {
            f"{name}.norm.weight": 1 + 0.1 * matrix(1, _HIDDEN)[0],
            f"{name}.mixer.in_proj.weight": 2 * matrix(2 * inner, _HIDDEN),
            f"{name}.mixer.conv1d.weight": matrix(inner * _WINDOW, 1).reshape(inner, 1, _WINDOW),
            f"{name}.mixer.conv1d.bias": matrix(inner, 1)[:, 0] / 4,
            f"{name}.mixer.x_proj.weight": 3 * matrix(rank + 2 * size, inner),
            f"{name}.mixer.dt_proj.weight": matrix(inner, rank),
            f"{name}.mixer.dt_proj.bias": matrix(inner, 1)[:, 0] / 2 - 1,
            f"{name}.mixer.A_log": matrix(inner * size, 1).reshape(inner, size) / 2 - 1,
            f"{name}.mixer.D": 1 + matrix(inner, 1)[:, 0] / 4,
            f"{name}.mixer.out_proj.weight": matrix(_HIDDEN, inner),
        }
    config = {
        "model_type": "mamba",
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": _HIDDEN,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "state_size": size,
        "conv_kernel": _WINDOW,
        "time_step_rank": rank,
        "max_position_embeddings": 2048,
    }
    return Checkpoint("mamba", Path("mamba"), config, tensors)


def mamba2_checkpoint(seed: int = 0, layers: int = 2) -> Checkpoint:
    """Mamba-2 in the layout of transformers: four heads of 16 values with states of 32 numbers."""
    matrix = random_matrices(seed)
    tensors = {
        "backbone.embeddings.weight": 2 * matrix(BYTE_VOCABULARY, _HIDDEN),
        "lm_head.bias": _letters(),
        "backbone.norm_f.weight": 1 + 0.1 * matrix(1, _HIDDEN)[0],
    }
    for name in (f"backbone.layers.{layer}" for layer in range(layers)):
        tensors[f"{name}.norm.weight"] = 1 + 0.1 * matrix(1, _HIDDEN)[0]
        tensors |= _mamba2_tensors(f"{name}.mixer", matrix)
    config = {
        "model_type": "mamba2",
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": _HIDDEN,
        "num_hidden_layers": layers,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 32,
        "n_groups": 2,
        "conv_kernel": _WINDOW,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    }
    return Checkpoint("mamba2", Path("mamba2"), config, tensors)


def hybrid_checkpoint(seed: int = 0) -> Checkpoint:
    """Granite 4's hybrid: Mamba-2, attention and Mamba-2, each with an MLP."""
    matrix, inner = random_matrices(seed), 2 * _HIDDEN
    types = ["mamba", "attention", "mamba"]
    tensors = {
        "model.embed_tokens.weight": 2 * matrix(BYTE_VOCABULARY, _HIDDEN),
        "lm_head.bias": _letters(),
        "model.norm.weight": 1 + 0.1 * matrix(1, _HIDDEN)[0],
    }
    for layer, kind in enumerate(types):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = 1 + 0.1 * matrix(1, _HIDDEN)[0]
        if kind == "mamba":
            tensors |= _mamba2_tensors(f"{name}.mamba", matrix)
        else:
            rows = {"q": _HIDDEN, "k": _HIDDEN // 2, "v": _HIDDEN // 2, "o": _HIDDEN}
            tensors |= {
                f"{name}.self_attn.{part}_proj.weight": 2 * matrix(count, _HIDDEN)
                for part, count in rows.items()
            }
        tensors[f"{name}.shared_mlp.input_linear.weight"] = matrix(2 * inner, _HIDDEN)
        tensors[f"{name}.shared_mlp.output_linear.weight"] = matrix(_HIDDEN, inner)
    config: dict[str, Any] = {
        "model_type": "granitemoehybrid",
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": _HIDDEN,
        "num_hidden_layers": len(types),
        "layer_types": types,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "intermediate_size": inner,
        "shared_intermediate_size": inner,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 32,
        "mamba_n_groups": 2,
        "mamba_d_conv": _WINDOW,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    }
    return Checkpoint("hybrid", Path("hybrid"), config, tensors)


def _letters() -> np.ndarray:
    bias = np.zeros(BYTE_VOCABULARY, np.float32)
    bias[97:103] = 12.0
    return bias


def _mamba2_tensors(name: str, matrix: Any) -> dict[str, np.ndarray]:
    """The tensors of one mixer: four heads of 16 values, two groups of states of 32 numbers."""
    heads, dim, groups, size = 4, 16, 2, 32
    inner, width = heads * dim, heads * dim + 2 * groups * size
    return {
        f"{name}.in_proj.weight": 2 * matrix(inner + width + heads, _HIDDEN),
        f"{name}.conv1d.weight": matrix(width * _WINDOW, 1).reshape(width, 1, _WINDOW),
        f"{name}.conv1d.bias": matrix(width, 1)[:, 0] / 4,
        f"{name}.dt_bias": matrix(heads, 1)[:, 0] / 2 - 1,
        f"{name}.A_log": matrix(heads, 1)[:, 0] / 2 - 1,
        f"{name}.D": 1 + matrix(heads, 1)[:, 0] / 4,
        f"{name}.norm.weight": 1 + 0.1 * matrix(1, inner)[0],
        f"{name}.out_proj.weight": matrix(_HIDDEN, inner),
    }
