"""Configs of small hybrid models, from safetensors and GGUF."""

from __future__ import annotations

from typing import Any

FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.2,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 1.4, 0.8, 1.2, 0.6],
    "mlp_multipliers": [0.9, 1.1],
}
NEMOTRON_H: dict[str, Any] = {
    "time_step_min": 1e-30,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    "num_hidden_layers": 4,
    "head_dim": 16,
    "ssm_state_size": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "n_groups": 2,
}
