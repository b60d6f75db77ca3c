"""A SambaY model with random weights in the layout of Phi-4-mini-flash-reasoning."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anydecode.certification.tiny import random_matrices
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.scripted import BYTE_VOCABULARY


def sambay_checkpoint(seed: int = 0, layers: int = 12, window: int = 5) -> Checkpoint:
    """Eight heads in four pairs, of which two share keys. `layers` is a multiple of four."""
    matrix = random_matrices(seed)
    hidden, heads, kv_heads, dim, inner, size, rank = 48, 8, 4, 6, 96, 8, 3

    def vector(count: int, mean: float = 0.0, spread: float = 0.2) -> np.ndarray:
        return mean + spread * matrix(count, 1)[:, 0]

    tensors = {
        "model.embed_tokens.weight": 2 * matrix(BYTE_VOCABULARY, hidden),
        "model.final_layernorm.weight": vector(hidden, 1.0),
        "model.final_layernorm.bias": vector(hidden),
        "lm_head.bias": np.zeros(BYTE_VOCABULARY, np.float32),
    }
    tensors["lm_head.bias"][97:103] = 12.0  # six likely letters, so that texts repeat themselves
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = vector(hidden, 1.0)
            tensors[f"{name}.{norm}.bias"] = vector(hidden)
        tensors[f"{name}.mlp.fc1.weight"] = 2 * matrix(2 * 72, hidden)
        tensors[f"{name}.mlp.fc2.weight"] = 0.5 * matrix(hidden, 72)
        own = {"out_proj.weight": matrix(hidden, inner if layer % 2 == 0 else heads * dim)}
        is_cross = layer > layers // 2 + 1
        if layer % 2:
            rows = heads * dim + (0 if is_cross else 2 * kv_heads * dim)
            own |= {
                "Wqkv.weight": 2 * matrix(rows, hidden),
                "Wqkv.bias": vector(rows),
                "out_proj.bias": vector(hidden),
                "inner_cross_attn.subln.weight": vector(2 * dim, 1.0),
            }
            names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
            own |= {f"inner_cross_attn.{one}": vector(dim, spread=0.5) for one in names}
        elif is_cross:
            own["in_proj.weight"] = 2 * matrix(inner, hidden)
        else:
            own |= {
                "in_proj.weight": 2 * matrix(2 * inner, hidden),
                "conv1d.weight": matrix(inner * 4, 1).reshape(inner, 1, 4),
                "conv1d.bias": vector(inner),
                "x_proj.weight": 3 * matrix(rank + 2 * size, inner),
                "dt_proj.weight": matrix(inner, rank),
                "dt_proj.bias": vector(inner, -1.0, 0.5),
                "A_log": matrix(inner * size, 1).reshape(inner, size) / 2 - 1,
                "D": vector(inner, 1.0),
            }
        tensors |= {f"{name}.attn.{one}": tensor for one, tensor in own.items()}
    config = {
        "architectures": ["Phi4FlashForCausalLM"],
        "model_type": "phi4flash",
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 72,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "mb_per_layer": 2,
        "mamba_d_state": size,
        "sliding_window": window,
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "mlp_bias": False,
        "lm_head_bias": False,
    }
    return Checkpoint("sambay", Path("sambay"), config, tensors)
