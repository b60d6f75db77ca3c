"""A BlockFFN model with random weights in the released layout. Its routers select few blocks,
because all hidden states have a common part, whose product with every router row is negative."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.certification.tiny import random_matrices
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.scripted import BYTE_VOCABULARY

HIDDEN, BLOCKS, SIZE, LAYERS = 64, 24, 32, 3


def blockffn_checkpoint(seed: int = 0, norm: str = "rms", ffn_type: str = "block") -> Checkpoint:
    """Three layers with 24 blocks of 32; `norm` and `ffn_type` are keys of the config."""
    matrix = random_matrices(seed)
    heads, nope, rope, rank, query_rank = 4, 10, 8, 20, 24
    value = HIDDEN // heads
    embedding = 2 * matrix(BYTE_VOCABULARY, HIDDEN)
    embedding[:, 0] = 1.0
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": 1 + 0.1 * matrix(1, HIDDEN)[0],
        "lm_head.weight": 3 * matrix(BYTE_VOCABULARY, HIDDEN),
        "lm_head.bias": np.zeros(BYTE_VOCABULARY, np.float32),
    }
    tensors["lm_head.bias"][97:103] = 3.0  # six likely letters, so that texts repeat themselves
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        router = 4 * matrix(BLOCKS, HIDDEN)
        router[:, 0] = -1.6
        shapes: dict[str, Any] = {
            "input_layernorm.weight": 1 + 0.1 * matrix(1, HIDDEN)[0],
            "post_attention_layernorm.weight": 1 + 0.1 * matrix(1, HIDDEN)[0],
            "self_attn.q_a_proj.weight": matrix(query_rank, HIDDEN),
            "self_attn.q_a_layernorm.weight": 1 + 0.1 * matrix(1, query_rank)[0],
            "self_attn.q_b_proj.weight": 2 * matrix(heads * (nope + rope), query_rank),
            "self_attn.kv_a_proj_with_mqa.weight": matrix(rank + rope, HIDDEN),
            "self_attn.kv_a_layernorm.weight": 1 + 0.1 * matrix(1, rank)[0],
            "self_attn.kv_b_proj.weight": matrix(heads * (nope + value), rank),
            "self_attn.o_proj.weight": matrix(HIDDEN, heads * value),
            "mlp.router_proj.weight": router,
        }
        if norm == "rms":
            shapes["mlp.router_norm.weight"] = 1 + 0.2 * matrix(1, BLOCKS)[0]
        up = matrix(BLOCKS * SIZE, HIDDEN)
        down = 0.3 * matrix(HIDDEN, BLOCKS * SIZE) * BLOCKS**0.5
        if ffn_type == "block":
            up = up.reshape(BLOCKS, SIZE, HIDDEN)
            down = np.ascontiguousarray(down.reshape(HIDDEN, BLOCKS, SIZE).swapaxes(0, 1))
        shapes |= {"mlp.up_proj": up, "mlp.down_proj": down}
        tensors |= {f"{name}.{part}": tensor for part, tensor in shapes.items()}
    config = {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "attention_type": "mla",
        "num_attention_heads": heads,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "q_lora_rank": query_rank,
        "kv_lora_rank": rank,
        "ffn_type": ffn_type,
        "hidden_act": "silu",
        "router_act": "relu",
        "expert_size": SIZE,
        "num_experts": BLOCKS,
        "norm_after_router": norm,
        "norm_scale": 0.5,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "scale_emb": 1.5,
        "scale_depth": 1.4,
        "dim_model_base": 32,
    }
    return Checkpoint("blockffn", Path("blockffn"), config, tensors)
