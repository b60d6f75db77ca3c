"""A Step-3 model with random weights, in the layout and with the config keys of published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.certification.tiny import random_matrices
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.scripted import BYTE_VOCABULARY

HIDDEN, HEADS, DIM, RANK, LAYERS = 48, 4, 16, 20, 3
EXPERTS, SIZE, SHARED = 6, 24, 40


def step3_checkpoint(seed: int = 0, **changes: Any) -> Checkpoint:
    """One dense layer and two with 6 experts; `changes` are keys of the text config."""
    matrix = random_matrices(seed)

    def norm(size: int) -> np.ndarray:
        return 1 + 0.1 * matrix(1, size)[0]

    def mlp(name: str, size: int) -> dict[str, np.ndarray]:
        return {
            f"{name}.gate_proj.weight": matrix(size, HIDDEN),
            f"{name}.up_proj.weight": matrix(size, HIDDEN),
            f"{name}.down_proj.weight": matrix(HIDDEN, size),
        }

    tensors = {
        "model.embed_tokens.weight": 2 * matrix(BYTE_VOCABULARY, HIDDEN) * HIDDEN**0.5,
        "model.norm.weight": norm(HIDDEN),
        "lm_head.weight": 3 * matrix(BYTE_VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        shapes = {
            "input_layernorm.weight": norm(HIDDEN),
            "post_attention_layernorm.weight": norm(HIDDEN),
            "self_attn.q_proj.weight": matrix(RANK, HIDDEN),
            "self_attn.inter_norm.weight": norm(RANK),
            "self_attn.wq.weight": 2 * matrix(HEADS * DIM, RANK),
            "self_attn.k_proj.weight": matrix(DIM, HIDDEN),
            "self_attn.v_proj.weight": matrix(DIM, HIDDEN),
            "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * DIM),
        }
        if layer == 0:
            shapes |= mlp("mlp", 64)
        else:
            shapes["moe.gate.weight"] = 2 * matrix(EXPERTS, HIDDEN)
            for kind, rows, columns in (
                ("gate", SIZE, HIDDEN),
                ("up", SIZE, HIDDEN),
                ("down", HIDDEN, SIZE),
            ):
                stack = matrix(EXPERTS * rows, columns).reshape(EXPERTS, rows, columns)
                shapes[f"moe.{kind}_proj.weight"] = stack
            shapes |= mlp("share_expert", SHARED)
        tensors |= {f"model.layers.{layer}.{name}": one for name, one in shapes.items()}
    text = {
        "architectures": ["Step3TextForCausalLM"],
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_attention_groups": 1,
        "head_dim": DIM,
        "share_q_dim": RANK,
        "max_seq_len": 2048,
        "max_position_embedding": 2048,
        "rope_theta": 5000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "moe_num_experts": EXPERTS,
        "moe_top_k": 2,
        "moe_intermediate_size": SIZE,
        "share_expert_dim": SHARED,
        "norm_expert_weight": False,
        "moe_layers_enum": "1,2",
        **changes,
    }
    config = {
        "architectures": ["Step3VLForConditionalGeneration"],
        "model_type": "step3_vl",
        "text_config": text,
    }
    return Checkpoint("step3", Path("step3"), config, tensors)
