"""Every family and its unusual settings against `transformers`, on tiny random models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.kernels.formats import quantize
from anydecode.kernels.interface import Rope
from anydecode.kernels.library import load_library
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network, spec_from_config
from anydecode.models.families.alibi import alibi_slopes
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Experts, Network, RecurrentWeights
from anydecode.models.opening import choose_executor, torch_executor
from anydecode.models.transformer import Transformer
from gguf_models import write_folder
from hybrid_configs import FALCON_H1, NEMOTRON_H
from tiny_models import (
    LATENT_SIZES,
    LONGCAT_SIZES,
    built,
    chain,
    checkpoint_of,
    greedy,
    hf_logits,
    hf_model,
    logits,
    own_model,
)

PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42]
NUM_TOKENS = 64

LONG = {"short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0], "long_factor": [1.0, 2, 3, 5, 7, 9.0]}

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
JETMOE: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "kv_channels": 12,
    "rms_norm_eps": 1e-5,
}
ZAYA: dict[str, Any] = {
    "head_dim": 12,
    "moe_intermediate_size": 24,
    "num_experts": 5,
    "router_hidden_size": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
#: `transformers` rounds the sizes of its cache to 64.
XLSTM: dict[str, Any] = {"hidden_size": 128, "num_heads": 4}
GRANITE_4: dict[str, Any] = {
    "layer_types": ["attention"] * 3,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 8,
    "shared_intermediate_size": 72,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
}
GRANITE_4_HYBRID: dict[str, Any] = {
    **GRANITE_4,
    "layer_types": ["mamba", "attention", "linear_attention"],
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
}
#: With the usual eps the last bit of an embedding changes the logits of these models by 2e-4, in
#: transformers too: the outputs of the recurrence are small before their norm.
GATED_DELTA: dict[str, Any] = {
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
QWEN_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
#: The prefill of transformers takes `time_step_min` for the lower limit of steps, its decoding does
#: not, nor do the states here.
NEMOTRON_EXPERTS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}
ERNIE_MOE: dict[str, Any] = {
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "moe_num_shared_experts": 2,
}
LFM2_MOE: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
VAULT_GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 10.0,
}
DOTS_1: dict[str, Any] = {
    "head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "max_window_layers": 3,
}
MINIMAX_M2: dict[str, Any] = {
    "head_dim": 12,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
}
BAMBA: dict[str, Any] = {
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 16,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
}
#: As MiMo-V2-Flash: a dense layer, then experts; windows in two of four layers.
MIMO_V2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "v_head_dim": 12,
    "sliding_window": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.4,
        },
        "sliding_attention": {
            "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.4,
        },
    },
}  # fmt: skip
#: With the usual eps the outputs of the recurrence are small before their norm.
KIMI_LINEAR: dict[str, Any] = {
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_num_heads": 3,
    "linear_head_dim": 12,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
#: Rotary rows are in the order of `transformers`, which is not that of the published checkpoints. A
#: padding token would have an embedding of zeros, for which the scores of an indexer are equal.
HY_V4: dict[str, Any] = {
    **LATENT_SIZES,
    "pad_token_id": None,
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "rope_parameters": ROPE,
    "rope_interleave": False,
    "indexer_rope_interleave": False,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 7,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 0.5,
    "hc_mult": 3,
    "hc_magnitude": 1.5,
}
#: Several times as many blocks as the indexer selects, as below; two layers with embeddings of
#: n-grams, one of them the first. The prompts have the token that ends a text.
QWEN_4_EXP: dict[str, Any] = {
    **GATED_DELTA,
    **QWEN_EXPERTS,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "indexed_attention"] * 2 + ["linear_attention"],
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
    "hc_count": 3,
    "hc_lowrank": 10,
    "ple_layer_ids": [1, 5],
    "ple_conv_kernel_size": 3,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 60,
    "make_ngram_vocab_size_divisible_by": 8,
    "eos_token_id": 64,
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 12,
    "indexer_compress_ratio": 3,
    "output_gate_type": "sigmoid",
}
#: Several times as many blocks as the indexer selects. With few heads of the indexer, scores would
#: often be equal: they are 0 where all products are negative.
GLM_5_NEXT: dict[str, Any] = {
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "linear_num_heads": 3,
    "linear_head_dim": 12,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_kpool": 3,
    "index_topk": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "swiglu_limit": 0.5,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
}
#: The numbers are few, because those of larger models differ by more than the margin.
ZAMBA: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "mamba_d_state": 5,
    "rms_norm_eps": 1e-2,
}
MUSE_SPARK: dict[str, Any] = {
    "head_dim": 12,
    "num_hidden_layers": 5,
    "sliding_window": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_hidden_size": 20,
    "mlp_layer_types": ["dense", *["sparse"] * 4],
    "routed_scaling_factor": 1.7,
    "qk_scale_factor": 2.5,
    "output_multiplier": 0.7,
    "rope_parameters": ROPE,
}
MISTRAL_LARGE_4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_n_heads": 16,
    "index_head_dim": 24,
    "index_topk": 9,
    "indexer_types": ["full", "full", "shared", "full"],
    "no_rope_layers": [1, 0, 1, 0],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
ZAMBA_2: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "num_hidden_layers": 4,
    "n_mamba_heads": 8,
    "mamba_d_state": 12,
    "adapter_rank": 5,
    "rms_norm_eps": 1e-2,
    "time_step_min": 1e-30,
}
OLMO_HYBRID: dict[str, Any] = {
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
}
DBRX: dict[str, Any] = {
    "d_model": 48,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2},
}
LING_3: dict[str, Any] = {
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 4,
    "layer_group_size": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kda_lower_bound": -3.0,
}
DEEPSEEK_V32: dict[str, Any] = {
    **LATENT_SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
    "index_topk": 8,
    "index_n_heads": 8,
    "index_head_dim": 16,
}
#: The first layer has full attention: `transformers` counts cached positions by it.
MINIMAX: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    "head_dim": 12,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "linear_attn_alpha_factor": 1.7,
    "linear_attn_beta_factor": 0.8,
    "full_attn_alpha_factor": 1.3,
    "mlp_alpha_factor": 1.6,
    "mlp_beta_factor": 0.7,
}
#: With larger weights, float32 and float64 differ by 1e-4 in `transformers` itself.
JAMBA: dict[str, Any] = {
    "initializer_range": 0.1,
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "mamba_d_state": 12,
    "rms_norm_eps": 1e-3,
}
MAMBA_2 = {"num_heads": 8, "head_dim": 12, "state_size": 16, "n_groups": 2}
#: With factors that grow within the test's positions.
MINISTRAL_3: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
GPT_OSS = {
    "head_dim": 16,
    "sliding_window": 8,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": False,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}

GEMMA_4: dict[str, Any] = {
    "initializer_range": 0.05,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 131,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 9.0,
}
GEMMA_4_ROPE: dict[str, Any] = {
    "full_attention": {
        "rope_type": "proportional", "partial_rotary_factor": 0.375, "rope_theta": 1e5,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
#: As in the largest dense model: nothing per layer and nothing shared.
GEMMA_4_KEYS_AS_VALUES: dict[str, Any] = {
    **GEMMA_4,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "attention_bias": True,
    "rope_parameters": GEMMA_4_ROPE,
}
GEMMA_4_EXPERTS: dict[str, Any] = {
    **GEMMA_4_KEYS_AS_VALUES,
    "attention_bias": False,
    "enable_moe_block": True,
    "num_experts": 7,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}

GEMMA_3N: dict[str, Any] = {
    "initializer_range": 0.05,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 131,
    "num_kv_shared_layers": 3,
    "laurel_rank": 6,
    "intermediate_size": [80, 80, 80, 56, 56, 56],
    "activation_sparsity_pattern": [0.95, 0.7, 0.3, 0.0, 0.0, 0.0],
    "final_logit_softcapping": 9.0,
}
GEMMA_3N_ODD: dict[str, Any] = {
    **GEMMA_3N,
    "altup_num_inputs": 3,
    "altup_active_idx": 1,
    "altup_correct_scale": False,
    "num_kv_shared_layers": 0,
    "intermediate_size": 77,
    "attention_bias": True,
    "vocab_size_per_layer_input": 100,
    "tie_word_embeddings": False,
}
KOLIBRI: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "head_dim": 16,
    "sliding_window": 6,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
DEEPSEEK_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK: dict[str, Any] = {**LATENT_SIZES, "num_key_value_heads": 4, **DEEPSEEK_EXPERTS}
EXAONE_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_shared_experts": 2,
}
DEEPSEEK_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
}

COMPASS_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 500.0,
    "mrope_section": [2, 2, 2],
}

HRM_TEXT: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "H_cycles": 2,
    "L_cycles": 2,
    "head_dim": 12,
}

#: Layers with windows have other sizes.
DOTS_3: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK_V32.items() if "group" not in key},
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 18,
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    "sliding_window": 6,
    "shared_experts_intermediate_size": 20,
    "rms_norm_eps": 1e-2,
    "rope_theta": 5000.0,
    "swa_rope_theta": 500.0,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 6,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 12,
    "swa_head_dim": 20,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 8,
}

MPT_ATTENTION: dict[str, Any] = {"clip_qkv": 0.7, "softmax_scale": 0.4}

#: As Scout, with the chunks and the growth of queries within the test's positions.
LLAMA_4: dict[str, Any] = {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "intermediate_size_mlp": 72,
    "num_local_experts": 5,
    "attention_chunk_size": 8,
    "floor_scale": 5,
    "attn_scale": 0.4,
    "rms_norm_eps": 1e-2,
}
#: As Maverick: every second layer has experts, and queries and keys have no norms.
LLAMA_4_DENSE: dict[str, Any] = {
    **LLAMA_4,
    "num_hidden_layers": 4,
    "interleave_moe_layer_step": 2,
    "use_qk_norm": False,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "no_rope_layers": [1, 0, 0, 1],
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}

#: The hidden states stay small, and the cap matters.
RECURRENT_GEMMA: dict[str, Any] = {
    "num_hidden_layers": 5,
    "attention_window_size": 7,
    "num_key_value_heads": 1,
    "logits_soft_cap": 3.0,
}
MELLUM: dict[str, Any] = {
    "head_dim": 12,
    "num_local_experts": 5,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
HY_3: dict[str, Any] = {
    "head_dim": 12,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "router_scaling_factor": 1.7,
}
AFMOE: dict[str, Any] = {
    "head_dim": 12,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
    "num_hidden_layers": 4,
    "global_attn_every_n_layers": 2,
    "sliding_window": 6,
    "route_scale": 1.7,
}
#: As Laguna-XS: more heads in layers with a window, and another rotary embedding.
LAGUNA: dict[str, Any] = {
    "head_dim": 12,
    "num_hidden_layers": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "sliding_window": 6,
    "moe_routed_scaling_factor": 1.7,
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    "num_attention_heads_per_layer": [4, 6, 6, 4],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 5e4,
            "partial_rotary_factor": 0.5,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_attention": {**ROPE, "partial_rotary_factor": 1.0},
    },
}
GRANITE_SWA: dict[str, Any] = {
    "sliding_window": 6,
    "num_hidden_layers": 5,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
COHERE_2_MOE: dict[str, Any] = {
    "head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "logit_scale": 1.0,
}
MINIMAX_M3: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "dense_intermediate_size": 56,
    "shared_intermediate_size": 40,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rotary_dim": 8,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2, "full_attention"],
    "swiglu_limit": 0.5,
}
FLINT: dict[str, Any] = {
    "head_dim": 12,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window": 6,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
#: The smallest encoders of images and sounds.
PHI_4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "crop_size": 28,
}
PHI_4_AUDIO = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 16,
    "depthwise_separable_out_channel": 16,
    "nemo_conv_channels": 16,
}
LONGCAT_FLASH: dict[str, Any] = {**LONGCAT_SIZES, "routed_scaling_factor": 2.5}
#: Layers of all kinds, with and without experts by token, and several times as many entries as the
#: indexer selects.
DEEPSEEK_V4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "partial_rotary_factor": 1 / 3,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 12,
    "sliding_window": 7,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "swiglu_limit": 0.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert decoder": (
        "ModernBertDecoder",
        {
            "num_hidden_layers": 4,
            "local_attention": 12,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "modernbert decoder with biases": (
        "ModernBertDecoder",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "decoder_bias": False,
            "classifier_activation": "silu",
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
    ),
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head size": ("Llama", {"head_dim": 20, "vocab_size": 129, "intermediate_size": 77}),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama all kv heads": ("Llama", {"num_key_value_heads": 4}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5}}),
    "llama dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 5000.0,
            }
        },
    ),
    "llama yarn mscale": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.8,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
    "llama llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama longrope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "original_max_position_embeddings": 128,
                **LONG,
            }
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3 windows": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8},
    ),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral no window": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2 windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 bias": ("Qwen3", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            "initializer_range": 0.05,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3n": ("Gemma3n", GEMMA_3N),
    "gemma3n odd": ("Gemma3n", GEMMA_3N_ODD),
    "gemma4": ("Gemma4", GEMMA_4),
    "gemma4 keys as values": ("Gemma4", GEMMA_4_KEYS_AS_VALUES),
    "gemma4 experts": ("Gemma4", GEMMA_4_EXPERTS),
    "gemma3": (
        "Gemma3",
        {
            "initializer_range": 0.05,
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
        },
    ),
    "gemma3 scaled": (
        "Gemma3",
        {
            "initializer_range": 0.05,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 9.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3 longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "longrope", **LONG},
        },
    ),
    "phi3 partial": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("Olmo2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral window": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 7},
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3 moe sparse": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
    "granite biases": (
        "Granite",
        {
            "attention_multiplier": 0.2,
            "residual_multiplier": 1.7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "phimoe": ("Phimoe", {"num_local_experts": 5, "router_jitter_noise": 0.2}),
    "phimoe longrope": (
        "Phimoe",
        {
            "num_local_experts": 5,
            "attention_bias": True,
            "lm_head_bias": True,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "original_max_position_embeddings": 256,
                "short_mscale": 1.2,
                "long_mscale": 1.3,
                **LONG,
            },
        },
    ),
    "ernie 4.5 moe": ("Ernie4_5_Moe", ERNIE_MOE),
    "ernie 4.5 moe odd": (
        "Ernie4_5_Moe",
        {
            **ERNIE_MOE,
            "num_hidden_layers": 5,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
        },
    ),
    "granite moe": (
        "GraniteMoe",
        {
            **{key: value for key, value in GRANITE_4.items() if "multiplier" in key},
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "granite moe shared": (
        "GraniteMoeShared",
        {
            "attention_multiplier": 0.3,
            "shared_intermediate_size": 72,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
        },
    ),
    "granite 4": ("GraniteMoeHybrid", {**GRANITE_4, "position_embedding_type": "rope"}),
    "granite 4 nope": ("GraniteMoeHybrid", {**GRANITE_4, "tie_word_embeddings": True}),
    "granite 4 hybrid": ("GraniteMoeHybrid", GRANITE_4_HYBRID),
    "granite 4 moe": (
        "GraniteMoeHybrid",
        {**GRANITE_4_HYBRID, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "falcon h1": ("FalconH1", FALCON_H1),
    "falcon h1 odd": (
        "FalconH1",
        {
            **FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "projectors_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon h1 plain": (
        "FalconH1",
        {"mamba_d_ssm": None, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_rms_norm": True},
    ),
    "nemotron h": ("NemotronH", NEMOTRON_H),
    "nemotron h odd": (
        "NemotronH",
        {
            **NEMOTRON_H,
            "layers_block_type": ["full_attention", "mlp", "linear_attention", "linear_attention"],
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
        },
    ),
    "nemotron h moe": ("NemotronH", {**NEMOTRON_H, **NEMOTRON_EXPERTS}),
    "nemotron h moe latent": (
        "NemotronH",
        {
            **NEMOTRON_H,
            **NEMOTRON_EXPERTS,
            "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp"],
            "moe_latent_size": 20,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "mlp_bias": True,
        },
    ),
    "lfm2 moe": ("Lfm2Moe", LFM2_MOE),
    "lfm2 moe no bias": (
        "Lfm2Moe",
        {**LFM2_MOE, "use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
    ),
    "granite 4 hybrid rope": (
        "GraniteMoeHybrid",
        {
            **GRANITE_4_HYBRID,
            "position_embedding_type": "rope",
            "layer_types": ["attention", "mamba", "full_attention"],
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "qwen3 next": ("Qwen3Next", {**GATED_DELTA, **QWEN_EXPERTS}),
    "qwen3 next odd": (
        "Qwen3Next",
        {
            **GATED_DELTA,
            **QWEN_EXPERTS,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "linear_conv_kernel_dim": 3,
            "linear_num_value_heads": 2,
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5": ("Qwen3_5", GATED_DELTA),
    "qwen3.5 period": ("Qwen3_5", {**GATED_DELTA, "full_attention_interval": 2}),
    "qwen3.5 moe": ("Qwen3_5Moe", {**GATED_DELTA, **QWEN_EXPERTS}),
    "recurrent gemma": ("RecurrentGemma", RECURRENT_GEMMA),
    "recurrent gemma odd": (
        "RecurrentGemma",
        {
            "lru_width": 36,
            "conv1d_width": 3,
            "block_types": ["attention", "recurrent"],
            "attention_bias": True,
            "num_key_value_heads": None,
            "tie_word_embeddings": False,
            "logits_soft_cap": 2.0,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
        },
    ),
    "mamba": ("Mamba", {"time_step_rank": 4}),
    "mamba odd": (
        "Mamba",
        {
            "intermediate_size": 75,
            "state_size": 13,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "falcon mamba": ("FalconMamba", {"mixer_rms_eps": 1e-3, "intermediate_size": 128}),
    "mamba2": ("Mamba2", MAMBA_2),
    "mamba2 odd": (
        "Mamba2",
        {
            **MAMBA_2,
            "n_groups": 1,
            "state_size": 13,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2 odd": (
        "Lfm2",
        {
            "full_attn_idxs": [1],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_ffn_dim_multiplier": 1.3,
            "block_multiple_of": 8,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2 own size": ("Lfm2", {"full_attn_idxs": [0, 2], "block_auto_adjust_ff_dim": False}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4 no bias": (
        "Glm4",
        {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 0.75},
    ),
    "ernie": ("Ernie4_5", {"head_dim": 16, "tie_word_embeddings": False}),
    "ernie biases": ("Ernie4_5", {"head_dim": 12, "use_bias": True}),
    "seed oss": ("SeedOss", {"head_dim": 16}),
    "seed oss output bias": ("SeedOss", {"head_dim": 8, "attention_out_bias": True}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 7}),
    "olmo3 yarn": (
        "Olmo3",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.1,
            },
        },
    ),
    "ministral": (
        "Ministral",
        {
            "head_dim": 12,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL_3}),
    "phi4 mini": (
        "Phi3",
        {
            "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.75,
            "hidden_size": 64,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **LONG},
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": 6, "num_hidden_layers": 4}),
    "exaone4 no window": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16}),
    "hunyuan alpha": (
        "HunYuanDenseV1",
        {
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 1000.0,
                "factor": 1.0,
                "rope_theta": 10000.0,
            },
        },
    ),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2 window": (
        "Starcoder2",
        {"use_bias": False, "sliding_window": 6, "hidden_act": "gelu", "num_hidden_layers": 4},
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma heads": ("Gemma", {"head_dim": 20, "num_key_value_heads": 1}),
    "vaultgemma": ("VaultGemma", VAULT_GEMMA),
    "phi": ("Phi", {"num_key_value_heads": 4}),
    "phi odd": (
        "Phi",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.34}, "layer_norm_eps": 1e-3},
    ),
    "stablelm": ("StableLm", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "stablelm norms": (
        "StableLm",
        {
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "num_key_value_heads": 2,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.34},
        },
    ),
    "stablelm parallel": (
        "StableLm",
        {
            "use_qkv_bias": True,
            "use_parallel_residual": True,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.34},
        },
    ),
    "olmo": ("Olmo", {}),
    "olmo clamped": ("Olmo", {"clip_qkv": 0.5, "tie_word_embeddings": True}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm odd": ("Glm", {"head_dim": 12, "attention_bias": False, "tie_word_embeddings": True}),
    "nemotron": ("Nemotron", {"head_dim": 12}),
    "nemotron biases": (
        "Nemotron",
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "norm_eps": 1e-3},
    ),
    "arcee": ("Arcee", {"head_dim": 12}),
    "arcee biases": ("Arcee", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "helium": ("Helium", {"head_dim": 12}),
    "helium heads": ("Helium", {"head_dim": 12, "num_key_value_heads": 1}),
    "cwm": ("Cwm", {"head_dim": 12, "sliding_window": 5, "num_hidden_layers": 5}),
    "dots1": ("Dots1", DOTS_1),
    "dots1 window": (
        "Dots1",
        {
            **DOTS_1,
            "sliding_window": 6,
            "max_window_layers": 1,
            "norm_topk_prob": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "mellum": ("Mellum", MELLUM),
    "mellum odd": (
        "Mellum",
        {
            **MELLUM,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "nanochat": ("NanoChat", {"hidden_act": "relu2"}),
    "nanochat odd": (
        "NanoChat",
        {
            "num_key_value_heads": 1,
            "final_logit_softcapping": 4.0,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {**ROPE, "rope_theta": 50.0},
        },
    ),
    "jais2": ("Jais2", {"head_dim": 12}),
    "jais2 odd": (
        "Jais2",
        {"head_dim": 16, "attention_bias": False, "mlp_bias": False, "layer_norm_eps": 1e-3},
    ),
    "hy3": ("HYV3", HY_3),
    "hy3 dense layers": (
        "HYV3",
        {
            **HY_3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_shared_experts": 2,
            "attention_bias": True,
        },
    ),
    "afmoe": ("Afmoe", AFMOE),
    "afmoe odd": (
        "Afmoe",
        {
            **AFMOE,
            "mup_enabled": True,
            "attention_bias": True,
            "num_shared_experts": 2,
            "num_dense_layers": 0,
        },
    ),
    "minimax m2": ("MiniMaxM2", MINIMAX_M2),
    "minimax m2 whole": (
        "MiniMaxM2",
        {**MINIMAX_M2, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}, "head_dim": 16},
    ),
    "bitnet": ("BitNet", {}),
    "bitnet odd": (
        "BitNet",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "intermediate_size": 77,
            "hidden_act": "silu",
        },
    ),
    "gemma4 unified": (
        "Gemma4Unified",
        {
            "initializer_range": 0.05,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 8,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 9.0,
        },
    ),
    "lfm3": ("Lfm3", {"head_dim": 12, "num_hidden_layers": 6, "sliding_window": 6}),
    "lfm3 odd": (
        "Lfm3",
        {
            "head_dim": 16,
            "use_attention_gate": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "attention_bias": True,
        },
    ),
    "laguna": ("Laguna", LAGUNA),
    "laguna elements": (
        "Laguna",
        {
            **LAGUNA,
            "gating": "per-element",
            "num_attention_heads_per_layer": None,
            "layer_types": ["full_attention"] * 4,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "attention_bias": True,
        },
    ),
    "granite swa": ("GraniteSWA", GRANITE_SWA),
    "granite swa bases": (
        "GraniteSWA",
        {
            "sliding_window": 6,
            "attention_bias": True,
            "attention_multiplier": 0.3,
            "layer_rope_theta": [0, 500.0, 5000.0],
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "granitemoe swa": (
        "GraniteMoeSWA",
        {
            "sliding_window": 6,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "attention_multiplier": 0.3,
        },
    ),
    "cohere2 moe": (
        "Cohere2Moe",
        {
            **COHERE_2_MOE,
            "num_hidden_layers": 5,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 56,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
        },
    ),
    "cohere2 moe sums": (
        "Cohere2Moe",
        {
            **COHERE_2_MOE,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "sliding_window_pattern": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "prefix_dense_sliding_window_pattern": 2,
            "norm_topk_prob": False,
        },
    ),
    "cohere2 moe rms": (
        "Cohere2Moe",
        {
            **COHERE_2_MOE,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek v4": ("DeepseekV4", DEEPSEEK_V4),
    "deepseek v4 sizes": (
        "DeepseekV4",
        {
            **DEEPSEEK_V4,
            "head_dim": 20,
            "partial_rotary_factor": 1.0,
            "o_groups": 4,
            "sliding_window": 40,
            "layer_types": ["compressed_sparse_attention"] * 2
            + ["heavily_compressed_attention"] * 2,
            "compress_rates": {
                "compressed_sparse_attention": 5,
                "heavily_compressed_attention": 3,
            },
            "mlp_layer_types": ["moe"] * 4,
            "scoring_func": "sigmoid",
            "index_head_dim": 24,
            "hc_mult": 5,
            "hc_sinkhorn_iters": 20,
            "rope_parameters": {"rope_type": "default"},
        },
    ),
    "mllama": ("Mllama", {"num_hidden_layers": 5, "cross_attention_layers": [1, 3]}),
    "mllama neighbours": (
        "Mllama",
        {"num_hidden_layers": 5, "cross_attention_layers": [1, 2, 4], "rope_parameters": ROPE},
    ),
    "phi4 multimodal": (
        "Phi4Multimodal",
        {
            "vision_config": PHI_4_VISION,
            "audio_config": PHI_4_AUDIO,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "partial_rotary_factor": 1.0,
                **LONG,
            },
        },
    ),
    "flint": ("Flint", FLINT),
    "flint experts": (
        "Flint",
        {**FLINT, "mlp_only_layers": [], "norm_topk_prob": False, "layer_types": None},
    ),
    "longcat flash": ("LongcatFlash", LONGCAT_FLASH),
    "longcat flash yarn": (
        "LongcatFlash",
        {**LONGCAT_FLASH, "zero_expert_num": 1, "rope_parameters": DEEPSEEK_ROPE},
    ),
    "minimax m3": ("MiniMaxM3VL", MINIMAX_M3),
    "minimax m3 local blocks": (
        "MiniMaxM3VL",
        {
            **MINIMAX_M3,
            "num_key_value_heads": 4,
            "index_n_heads": 4,
            "index_block_size": 5,
            "index_local_blocks": 2,
        },
    ),
    "minimax m3 one selection": (
        "MiniMaxM3VL",
        {**MINIMAX_M3, "index_n_heads": 1, "index_head_dim": 16, "index_local_blocks": 0},
    ),
    "mimo v2": ("MiMoV2Flash", MIMO_V2),
    "mimo v2 groups": (
        "MiMoV2Flash",
        {
            **MIMO_V2,
            "num_key_value_heads": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "attention_bias": True,
            "attention_value_scale": None,
            "n_group": 2,
            "v_head_dim": 20,
        },
    ),
    "kimi linear": ("KimiLinear", KIMI_LINEAR),
    "hy4": ("HYV4", HY_V4),
    "hy4 odd": (
        "HYV4",
        {
            **HY_V4,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse"],
            "indexer_types": ["full", "shared", "shared", "full", "full"],
            "index_head_dim": 24,
            "swiglu_limit": 0.2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "hc_mult": 2,
            "hc_eps": 0.01,
        },
    ),
    "qwen 3.8": ("Qwen4Exp", QWEN_4_EXP),
    "qwen 3.8 odd": (
        "Qwen4Exp",
        {
            **QWEN_4_EXP,
            "num_hidden_layers": 4,
            "layer_types": None,
            "ple_layer_ids": [2],
            "ple_embed_dim": 36,
            "ple_conv_kernel_size": 4,
            "ngram_size": 4,
            "heads_per_ngram": 1,
            "eos_token_id": [3, 12],
            "hc_count": 2,
            "rope_parameters": ROPE,  # whose part is the whole by default
            "indexer_head_dim": 16,
            "indexer_budget": 10,
            "indexer_compress_ratio": 5,
            "output_gate_type": None,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "norm_topk_prob": False,
        },
    ),
    "glm 5.3": ("Glm5Next", GLM_5_NEXT),
    "glm 5.3 shared indexers": (
        "Glm5Next",
        {
            **GLM_5_NEXT,
            "layer_types": [*["indexed_attention"] * 2, "linear_attention", "indexed_attention"],
            "indexer_types": ["full", "shared", "full", "full"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "index_kpool": 5,
            "index_topk": 10,
            "index_n_heads": 16,
            "index_head_dim": 24,
            "linear_lower_bound": None,
            "linear_conv_kernel_dim": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "attention_bias": True,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "hc_mult": 2,
            "tie_word_embeddings": False,
        },
    ),
    "zamba": ("Zamba", ZAMBA),
    "zamba odd": (
        "Zamba",
        {
            **ZAMBA,
            "layers_block_type": None,
            "num_hidden_layers": 5,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "n_mamba_heads": 3,
            "mamba_dt_rank": 7,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": False,
            "num_key_value_heads": 4,
            "hidden_act": "silu",
        },
    ),
    "mistral large 4": ("MistralLarge4", MISTRAL_LARGE_4),
    "mistral large 4 shared latents": (
        "MistralLarge4",
        {
            **MISTRAL_LARGE_4,
            "num_hidden_layers": 6,
            "no_rope_layers": [1, 0, 1, 0, 1, 0],
            "kv_source_layers": [0, 1, 0, 1, 0, 5],
            "indexer_types": ["full", "full", "shared", "full", "shared", "shared"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse", "dense"],
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": ROPE,
            "final_logit_softcapping": 3.0,
        },
    ),
    "muse spark": ("MuseSpark", MUSE_SPARK),
    "muse spark odd": (
        "MuseSpark",
        {
            **MUSE_SPARK,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            "layer_rope_theta": [500.0, 0, 500.0, 0, 500.0],
            "mlp_layer_types": None,
            "num_experts_per_tok": 3,
            "moe_hidden_size": 64,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "post_norm_eps": 0.02,
            "residual_gate_temperature": 0.1,
            "final_logit_softcapping": 3.0,
        },
    ),
    "zamba 2": ("Zamba2", ZAMBA_2),
    "zamba 2 odd": (
        "Zamba2",
        {
            **ZAMBA_2,
            "layers_block_type": ["hybrid"] * 3,
            "num_hidden_layers": 3,
            "hidden_size": 16,
            "num_key_value_heads": 4,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "rope_parameters": ROPE,
            "add_bias_linear": True,
            "mamba_ngroups": 2,
            "mamba_d_conv": 3,
            "hidden_act": "silu",
        },
    ),
    "olmo hybrid": ("OlmoHybrid", OLMO_HYBRID),
    "olmo hybrid rope": (
        "OlmoHybrid",
        {
            **OLMO_HYBRID,
            "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"],
            "rope_parameters": ROPE,
            "linear_allow_neg_eigval": False,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
        },
    ),
    "ling 3": ("BailingHybrid", LING_3),
    "ling 3 odd": (
        "BailingHybrid",
        {
            **LING_3,
            "layer_types": ["full_attention", *["linear_attention"] * 3],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "kda_safe_gate": False,
            "short_conv_kernel_size": 3,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": ROPE,
        },
    ),
    "kimi linear odd": (
        "KimiLinear",
        {
            **KIMI_LINEAR,
            "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"],
            "q_lora_rank": 24,
            "linear_conv_kernel_dim": 3,
            "n_group": 2,
        },
    ),
    "deepseek v3.2": ("DeepseekV32", DEEPSEEK_V32),
    "deepseek v3.2 yarn": (
        "DeepseekV32",
        {**DEEPSEEK_V32, "rope_parameters": {**DEEPSEEK_ROPE, "factor": 16.0}},
    ),
    "glm moe dsa": ("GlmMoeDsa", {**DEEPSEEK_V32, "n_group": 1}),
    "glm moe dsa with shared indexers": (
        "GlmMoeDsa",
        {**DEEPSEEK_V32, "n_group": 1, "indexer_types": ["full", "shared", "shared"]},
    ),
    "minimax": ("MiniMax", MINIMAX),
    "minimax alternating": (
        "MiniMax",
        {**MINIMAX, "layer_types": None, "num_local_experts": 4, "rope_parameters": ROPE},
    ),
    "hunyuan moe": ("HunYuanMoEV1", {"num_experts": 5, "moe_topk": 2, "head_dim": 12}),
    "hunyuan moe biases": (
        "HunYuanMoEV1",
        {"num_experts": 4, "moe_topk": 1, "head_dim": 16, "attention_bias": True},
    ),
    "jamba": ("Jamba", JAMBA),
    "jamba one expert": (
        "Jamba",
        {
            **JAMBA,
            "num_experts": 1,
            "mamba_dt_rank": 5,
            "mamba_expand": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "bamba": ("Bamba", BAMBA),
    "bamba groups": (
        "Bamba",
        {**BAMBA, "mamba_n_groups": 2, "mamba_proj_bias": True, "attn_layer_indices": [0, 2]},
    ),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere norms": (
        "Cohere",
        {"use_qk_norm": True, "layer_norm_eps": 1e-3, "num_key_value_heads": 2},
    ),
    "cohere biases": ("Cohere", {"attention_bias": True, "num_key_value_heads": 4}),
    "cohere2": ("Cohere2", {"logit_scale": 0.3, "num_hidden_layers": 4, "sliding_window": 6}),
    "gptj": ("GPTJ", {"rotary_dim": 8}),
    "gptj whole": ("GPTJ", {"rotary_dim": 12, "n_inner": 80, "tie_word_embeddings": True}),
    "codegen": ("CodeGen", {"rotary_dim": 8}),
    "codegen heads": ("CodeGen", {"rotary_dim": 4, "num_attention_heads": 8}),
    "gpt2": ("GPT2", {}),
    "gpt2 untied": ("GPT2", {"n_inner": 72, "tie_word_embeddings": False}),
    "gpt neo": (
        "GPTNeo",
        {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 8},
    ),
    "gpt neo local": (
        "GPTNeo",
        {
            "attention_types": [[["local"], 3]],
            "window_size": 5,
            "intermediate_size": 72,
            "tie_word_embeddings": False,
        },
    ),
    "gpt bigcode": ("GPTBigCode", {}),
    "gpt bigcode heads": (
        "GPTBigCode",
        {"multi_query": False, "n_inner": 72, "tie_word_embeddings": False},
    ),
    "gpt neox": ("GPTNeoX", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "gpt neox sequential": (
        "GPTNeoX",
        {"use_parallel_residual": False, "hidden_size": 64, "tie_word_embeddings": True},
    ),
    "gpt neox japanese": ("GPTNeoXJapanese", {"intermediate_multiple_size": 3}),
    "gpt neox japanese odd": (
        "GPTNeoXJapanese",
        {
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
            "hidden_act": "gelu_new",
            "tie_word_embeddings": False,
        },
    ),
    "falcon": ("Falcon", {"ffn_hidden_size": 72}),
    "bloom": ("Bloom", {}),
    "bloom odd": (
        "Bloom",
        {"num_attention_heads": 12, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False},
    ),
    "bloom few heads": ("Bloom", {"num_attention_heads": 3, "num_hidden_layers": 2}),
    "llama4": ("Llama4", LLAMA_4),
    "llama4 dense": ("Llama4", LLAMA_4_DENSE),
    "llama4 plain": (
        "Llama4",
        {**LLAMA_4, "attn_temperature_tuning": False, "moe_layers": [1, 4], "head_dim": 12},
    ),
    "mpt": ("Mpt", {}),
    "mpt odd": ("Mpt", {"num_attention_heads": 12, "attn_config": MPT_ATTENTION}),
    "apertus": (
        "Apertus",
        {
            "head_dim": 12,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    "openai gpt": (
        "OpenAIGPT",
        {"n_positions": 120, "num_attention_heads": 6, "tie_word_embeddings": False},
    ),
    "biogpt": ("BioGpt", {"max_position_embeddings": 120, "tie_word_embeddings": False}),
    "biogpt unscaled": ("BioGpt", {"scale_embedding": False, "num_attention_heads": 6}),
    "xglm": (
        "XGLM",
        {"ffn_dim": 72, "max_position_embeddings": 120, "tie_word_embeddings": False},
    ),
    "xglm unscaled": ("XGLM", {"ffn_dim": 80, "scale_embedding": False}),
    "persimmon": ("Persimmon", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "persimmon without norms": (
        "Persimmon",
        {"qk_layernorm": False, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
    ),
    "dbrx": ("Dbrx", DBRX),
    "dbrx odd": (
        "Dbrx",
        {
            **DBRX,
            "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 1},
        },
    ),
    "opt": ("OPT", {"ffn_dim": 72, "max_position_embeddings": 120}),
    "opt norms of sums": (
        "OPT",
        {
            "ffn_dim": 72,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 20,
            "tie_word_embeddings": False,
        },
    ),
    "opt projections": ("OPT", {"ffn_dim": 72, "word_embed_proj_dim": 56}),
    "opt without biases": (
        "OPT",
        {
            "ffn_dim": 72,
            "enable_bias": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
    ),
    "falcon linear biases": (
        "Falcon",
        # The eager attention of transformers adds the linear biases twice.
        {
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "attn_implementation": "sdpa",
            "tie_word_embeddings": False,
        },
    ),
    "falcon new": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon one norm": (
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "num_hidden_layers": 4,
        },
    ),
    "falcon sequential": (
        "Falcon",
        {"multi_query": False, "parallel_attn": False, "num_kv_heads": 4},
    ),
    "gpt oss": ("GptOss", {**GPT_OSS, "rope_parameters": GPT_OSS_ROPE}),
    "gpt oss clamped": (
        "GptOss",
        {
            **GPT_OSS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "num_experts_per_tok": 1,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "swiglu_limit": 0.5,
            "swiglu_alpha": 2.0,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "glm4 moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "glm4 moe plain": (
        "Glm4Moe",
        {
            "head_dim": 12,
            "moe_intermediate_size": 20,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "deepseek v2": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": DEEPSEEK_ROPE,
        },
    ),
    "deepseek v2 lite": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": None, "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek v3": (
        "DeepseekV3",
        {**DEEPSEEK, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_ROPE},
    ),
    "deepseek v3 one group": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "attention_bias": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "rope_parameters": {**DEEPSEEK_ROPE, "beta_fast": 1.0, "mscale": 1.0},
        },
    ),
    "axk1": (
        "AXK1",
        {**DEEPSEEK, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_ROPE},
    ),
    "axk1 listed": (
        "AXK1",
        {
            **{key: value for key, value in DEEPSEEK.items() if "dense" not in key},
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
        },
    ),
    "axk2": ("AXK2", {**DEEPSEEK_V32, "gated_norm_rank": 6, "rope_parameters": DEEPSEEK_ROPE}),
    "axk2 odd": (
        "AXK2",
        {
            **{key: value for key, value in DEEPSEEK_V32.items() if "dense" not in key},
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": None,
            "topk_group": None,
            "gated_norm_rank": 5,
            "attention_bias": True,
            "norm_topk_prob": False,
            "index_topk": 5,
        },
    ),
    "dots3 note": ("Dots3Note", DOTS_3),
    "dots3 note full": (
        "Dots3Note",
        {
            **DOTS_3,
            "use_dsa": False,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    ),
    "hrm text": ("HrmText", HRM_TEXT),
    "hrm text odd": (
        "HrmText",
        {
            **HRM_TEXT,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "L_cycles": 1,
            "head_dim": 10,
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_scale": 3.0,
            "rms_norm_eps": 1e-1,
            "tie_word_embeddings": True,
            "rope_parameters": ROPE,
        },
    ),
    "diffllama": ("DiffLlama", {"num_attention_heads": 8}),
    "diffllama odd": (
        "DiffLlama",
        {
            "num_key_value_heads": 4,
            "head_dim": 10,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": ROPE,
        },
    ),
    "cohere compass": (
        "CohereCompass",
        {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "logit_scale": 0.3,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "rope_parameters": {"sliding_attention": COMPASS_ROPE, "full_attention": None},
        },
    ),
    "cohere compass full": (
        "CohereCompass",
        {
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_norm_eps": 1e-2,
            "rope_parameters": {"full_attention": {**COMPASS_ROPE, "mrope_section": [4, 2, 2]}},
        },
    ),
    "solar open": (
        "SolarOpen",
        {
            **{key: value for key, value in DEEPSEEK_EXPERTS.items() if "dense" not in key},
            "head_dim": 12,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "flex olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3}),
    "flex olmo normalised": (
        "FlexOlmo",
        {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "youtu": ("Youtu", {**LATENT_SIZES, "num_key_value_heads": 4}),
    "youtu full queries": (
        "Youtu",
        {
            **LATENT_SIZES,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "tie_word_embeddings": False,
            "rope_parameters": DEEPSEEK_ROPE,
        },
    ),
    "minicpm3": (
        "MiniCPM3",
        {**LATENT_SIZES, "num_key_value_heads": 4, "dim_model_base": 20, "scale_emb": 3},
    ),
    "minicpm3 longrope": (
        "MiniCPM3",
        {
            **LATENT_SIZES,
            "num_key_value_heads": 4,
            "v_head_dim": None,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "longrope",
                "original_max_position_embeddings": 128,
                "short_factor": LONG["short_factor"][:4],
                "long_factor": LONG["long_factor"][:4],
            },
        },
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
    ),
    "hyperclovax usual": ("HyperCLOVAX", {"attention_bias": True, "tie_word_embeddings": True}),
    "exaone moe": (
        "ExaoneMoe",
        {
            **EXAONE_MOE,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
        },
    ),
    "exaone moe dense": (
        "ExaoneMoe",
        {
            **EXAONE_MOE,
            "sliding_window": 6,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.7,
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **DEEPSEEK,
            "first_k_dense_replace": 0,
            "rope_parameters": MINISTRAL_3,
        },
    ),
    "mistral4 groups": (
        "Mistral4",
        {
            **DEEPSEEK,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": None,
            "rope_parameters": {**DEEPSEEK_ROPE, "llama_4_scaling_beta": 0.3},
        },
    ),
    "glm4 moe lite": (
        "Glm4MoeLite",
        {
            **{key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"},
            "rms_norm_eps": 1e-5,
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
    ),
    "qwen2 moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen2 moe windows": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 17,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
            "qkv_bias": False,
        },
    ),
    "aria": (
        "AriaText",
        {"moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 2},
    ),
    "aria odd": (
        "AriaText",
        {
            "head_dim": 16,
            "intermediate_size": 12,
            "moe_num_experts": 3,
            "moe_topk": 3,
            "moe_num_shared_experts": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "kolibri": ("Kolibri1", KOLIBRI),
    "kolibri odd": (
        "Kolibri1",
        {
            **KOLIBRI,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 17,
            "norm_topk_prob": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "jetmoe": ("JetMoe", JETMOE),
    "jetmoe odd": (
        "JetMoe",
        {
            **JETMOE,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 1,
            "kv_channels": 10,
            "tie_word_embeddings": False,
            "rms_norm_eps": 0.05,
            "rope_parameters": ROPE,
        },
    ),
    "zaya": ("Zaya", ZAYA),
    "zaya odd": (
        "Zaya",
        {
            **ZAYA,
            "head_dim": 8,
            "num_key_value_heads": 1,
            "num_experts": 3,
            "router_hidden_size": 8,
            "lm_head_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "sliding_window": 5,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        },
    ),
    "xlstm": ("xLSTM", XLSTM),
    "xlstm odd": (
        "xLSTM",
        {
            **XLSTM,
            "num_heads": 2,
            "qk_dim_factor": 1.0,
            "v_dim_factor": 0.5,
            "gate_soft_cap": 4.0,
            "output_logit_soft_cap": 7.0,
            "ffn_proj_factor": 1.4,
            "norm_eps": 1e-3,
            "eps": 1e-2,
            "chunk_size": 16,
        },
    ),
    "doge": ("Doge", {"rms_norm_eps": 1e-5, "rope_parameters": ROPE}),
    "doge odd": (
        "Doge",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "sliding_window": 6,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "rms_norm_eps": 1e-5}),
    "olmoe normalised": (
        "Olmoe",
        {
            "num_experts": 3,
            "num_experts_per_tok": 1,
            "norm_topk_prob": True,
            "num_key_value_heads": 1,
            "attention_bias": True,
        },
    ),
}


def expected_tokens(model: Any, prompt: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens and the logits of every position."""
    import torch
    from transformers import DynamicCache

    tokens, rows = list(prompt), []
    # The steps of Bamba with a cache differ from its prefill, and GPT has none.
    if type(model).__name__.startswith(("Bamba", "OpenAIGPT")):
        for _ in range(count):
            tokens.append(int(hf_logits(model, tokens)[-1].argmax()))
        return tokens[len(prompt) :], hf_logits(model, tokens[:-1])
    is_mamba = type(model).__name__.startswith(("Mamba", "FalconMamba", "xLSTM"))
    name = "cache_params" if is_mamba else "past_key_values"
    past: dict[str, Any] = {}
    if type(model).__name__.startswith("RecurrentGemma"):  # its outputs have no cache
        past = {name: DynamicCache(config=model.config)}
    step = torch.tensor([prompt])
    for _ in range(count):
        with torch.inference_mode():
            out = model(step, **past, use_cache=True)
        past = {name: out[name]} if name in out else past
        rows.append(out.logits[0].numpy())
        step = out.logits[:, -1:].argmax(-1)
        tokens.append(int(step))
    return tokens[len(prompt) :], np.concatenate(rows)


def _parity_cases() -> Iterator[Any]:
    """Every case on both backends; further settings of a family on torch are slow tests."""
    families = set()
    for case, (family, _) in CASES.items():
        is_first = family not in families
        families.add(family)
        yield pytest.param(case, "native")
        yield pytest.param(case, "torch", marks=() if is_first else pytest.mark.slow)


@lru_cache(1)
def _reference(case: str) -> tuple[Any, list[int], np.ndarray]:
    """The model of a case, its greedy tokens and their logits."""
    family, settings = CASES[case]
    theirs = hf_model(family, **settings)
    return theirs, *expected_tokens(theirs, PROMPT, NUM_TOKENS)


@pytest.mark.one_in(5)  # an odd number: both backends
@pytest.mark.parametrize(("case", "backend"), [*_parity_cases()])
def test_logits_and_greedy_tokens_match_transformers(case: str, backend: str) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    theirs, tokens, reference = _reference(case)
    ours = own_model(theirs, "float32", executor=choose_executor(backend))
    assert len(set(tokens)) > 2, "a model that repeats itself proves little"
    assert greedy(ours, PROMPT, NUM_TOKENS) == tokens
    whole = logits(ours, chain(PROMPT + tokens[:-1]))
    assert np.abs(whole - reference).max() < 1e-4


#: Model types without classes of their own in `transformers`: the case whose model they are, and
#: the names of their classes.
RENAMED = {
    "mimo": ("qwen2", "MiMoForCausalLM"),
    "kimi_k2": ("deepseek v3", "DeepseekV3ForCausalLM"),
    "internlm3": ("llama biases", "InternLM3ForCausalLM"),
}


@pytest.mark.parametrize("model_type", RENAMED)
def test_families_with_another_name(model_type: str) -> None:
    case, architecture = RENAMED[model_type]
    family, settings = CASES[case]
    model = hf_model(family, **settings)
    stored = checkpoint_of(model, model_type=model_type, architectures=[architecture])
    assert np.array_equal(logits(built(stored), chain(PROMPT)), ours(model))


@pytest.mark.parametrize("num_heads", [1, 4, 6, 12, 112])
def test_slopes_of_linear_biases(num_heads: int) -> None:
    """The two functions of `transformers`; MPT's config has the largest bias, which `transformers`
    does not read."""
    pytest.importorskip("torch")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    theirs = bloom._get_alibi_slopes(num_heads, "cpu").numpy()
    assert np.allclose(alibi_slopes(num_heads), theirs, rtol=1e-5)
    theirs = -mpt.build_mpt_alibi_tensor(num_heads, 2, 16)[:, 0, 0].numpy()
    assert np.allclose(alibi_slopes(num_heads, 16.0), theirs, rtol=1e-5)


def test_minicpm_is_granite_with_other_names_of_its_factors() -> None:
    """`transformers` has Granite, but not MiniCPM."""
    theirs = hf_model(
        "Granite",
        embedding_multiplier=12.0,
        residual_multiplier=1.4 / 3**0.5,
        logits_scaling=48 / 16,
        attention_multiplier=12**-0.5,
        tie_word_embeddings=True,
    )
    stored = checkpoint_of(theirs, model_type="minicpm", architectures=["MiniCPMForCausalLM"])
    granite = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    stored.config = {key: value for key, value in stored.config.items() if key not in granite}
    stored.config |= {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    found = logits(built(stored, "float32"), chain(PROMPT))
    assert np.abs(found - hf_logits(theirs, PROMPT)).max() < 1e-4
    stored.config["sparse_config"] = {"kernel_size": 32}
    with pytest.raises(CheckpointError, match="sparse attention"):
        built(stored)


def test_the_letters_of_a_hybrid_pattern() -> None:
    model = hf_model("Exaone4", num_hidden_layers=4, sliding_window=6)
    stored = checkpoint_of(model)
    stored.config |= {"layer_types": None, "sliding_window_pattern": "LLLG"}
    assert np.array_equal(logits(built(stored), chain(PROMPT)), ours(model))
    stored.config["sliding_window_pattern"] = "GLLG"
    assert not np.array_equal(logits(built(stored), chain(PROMPT)), ours(model))


def test_ministral3_inside_a_multimodal_model() -> None:
    model = hf_model("Ministral3", head_dim=16, rope_parameters=MINISTRAL_3)
    inner = checkpoint_of(model)
    config = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {**inner.config, "architectures": None},
    }
    outer = checkpoint_of(model)
    outer.config = config
    outer.tensors = {f"language_model.{name}": t for name, t in inner.tensors.items()}
    assert np.array_equal(logits(built(outer), chain(PROMPT)), ours(model))


@pytest.mark.parametrize(
    "family",
    [
        *("Mixtral", "Qwen3Moe", "Phi3", "GptOss", "Glm4Moe", "Qwen2Moe", "Olmoe"),
        *("GraniteMoeHybrid", "GraniteMoe", "GraniteMoeShared", "Lfm2Moe", "Ernie4_5_Moe"),
        *("Phimoe", "DeepseekV2", "DeepseekV3", "NemotronH"),
    ],
)
def test_expert_names_of_saved_files(family: str, tmp_path: Any) -> None:
    """Saved files have other names for experts than the modules."""
    settings = {"num_local_experts": 4} if family == "Mixtral" else {}
    if family == "Qwen3Moe":
        settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    if family == "GptOss":
        settings = GPT_OSS
    if family.startswith("GraniteMoe"):
        kind = family.removeprefix("GraniteMoe")
        case = {"Hybrid": "granite 4 moe", "Shared": "granite moe shared"}.get(kind, "granite moe")
        settings = CASES[case][1]
    if family in ("Lfm2Moe", "Ernie4_5_Moe", "NemotronH"):
        nemotron = CASES["nemotron h moe latent"][1]
        settings = {"Lfm2Moe": LFM2_MOE, "Ernie4_5_Moe": ERNIE_MOE, "NemotronH": nemotron}[family]
    if family in ("DeepseekV2", "DeepseekV3"):
        settings = {**DEEPSEEK, "n_group": 2, "topk_group": 1}
    if family in ("Glm4Moe", "Qwen2Moe", "Olmoe"):
        case = {"Glm4Moe": "glm4 moe", "Qwen2Moe": "qwen2 moe", "Olmoe": "olmoe"}[family]
        settings = CASES[case][1]
    model = hf_model(family, **settings)
    model.save_pretrained(tmp_path)
    stored = checkpoint_of(model)
    stored.tensors = load_file(tmp_path / "model.safetensors")
    assert np.array_equal(logits(built(stored), chain(PROMPT)), ours(model))


def test_axk1_as_published(tmp_path: Any) -> None:
    """Norms of experts beside them, in every layer, and routers without biases."""
    model = hf_model("AXK1", **CASES["axk1"][1])
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.post_mlp_layernorm.weight" in tensors
    tensors["model.layers.0.post_mlp_layernorm.weight"] = np.zeros(48, np.float32)
    stored = checkpoint_of(model)
    stored.tensors = {key: x for key, x in tensors.items() if "e_score" not in key}
    assert len(stored.tensors) < len(tensors)
    assert np.array_equal(logits(built(stored), chain(PROMPT)), ours(model))


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
            {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        ({"rope_parameters": {"rope_theta": 700.0, "rope_type": "default"}}, {"rope_theta": 700.0}),
    ],
)
def test_old_rope_layout(new: dict[str, Any], old: dict[str, Any]) -> None:
    model = hf_model("Llama", **new)
    stored = checkpoint_of(model)
    config = {k: v for k, v in stored.config.items() if k != "rope_parameters"}
    stored.config = {**config, **old}
    assert np.array_equal(logits(built(stored), chain(PROMPT)), ours(model))


def test_old_gemma3_layout() -> None:
    settings: dict[str, Any] = {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2}
    model = hf_model("Gemma3", **settings)
    stored = checkpoint_of(model)
    for key in ("rope_parameters", "layer_types"):
        del stored.config[key]
    stored.config.update(
        rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None, sliding_window_pattern=2
    )
    assert np.array_equal(logits(built(stored), chain(PROMPT)), ours(model))


def test_gemma4_inside_a_multimodal_model() -> None:
    """As published: the sizes of single layers under keys of their own, tensors of the language
    model behind a prefix, and towers that are left out."""
    theirs = hf_model("Gemma4", **GEMMA_4_EXPERTS)
    stored = checkpoint_of(theirs)
    config = {**stored.config, "use_bidirectional_attention": "vision"}
    del config["per_layer_config"]
    config |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    outer = {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": config,
    }
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in stored.tensors.items()
        if name != "lm_head.weight"
    }
    tensors["model.vision_tower.patch_embedder.weight"] = np.zeros((2, 2), np.float32)
    ours = built(replace(stored, config=outer, tensors=tensors))
    assert np.abs(logits(ours, chain(PROMPT)) - hf_logits(theirs, PROMPT)).max() < 1e-4


def test_gemma3n_inside_a_multimodal_model(tmp_path: Any) -> None:
    theirs = hf_model("Gemma3n", **GEMMA_3N)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor.numpy()
        for name, tensor in theirs.state_dict().items()
    }
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": theirs.config.to_dict(),
        "audio_config": {},
    }
    checkpoint = load_checkpoint(write_folder(tmp_path / "nested", tensors, **config))
    found = logits(built(checkpoint, "float32"), chain(PROMPT))
    assert np.abs(found - hf_logits(theirs, PROMPT)).max() < 1e-4


def test_llama4_inside_a_multimodal_model(tmp_path: Any) -> None:
    """As it is published: an empty list of layers without rope, and a number for the switch of the
    growth of queries."""
    theirs = hf_model("Llama4", **LLAMA_4)
    tensors = {f"language_model.{name}": x.numpy() for name, x in theirs.state_dict().items()}
    text = theirs.config.to_dict()
    changes = {"no_rope_layers": [], "layer_types": None, "attn_temperature_tuning": 4}
    config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {**text, **changes, "moe_layers": None},
    }
    checkpoint = load_checkpoint(write_folder(tmp_path / "nested", tensors, **config))
    found = logits(built(checkpoint, "float32"), chain(PROMPT))
    assert np.abs(found - hf_logits(theirs, PROMPT)).max() < 1e-4


def test_gemma3_inside_a_multimodal_model() -> None:
    model = hf_model("Gemma3", head_dim=16)
    inner = checkpoint_of(model)
    outer = checkpoint_of(model)
    outer.config = {"model_type": "gemma3", "text_config": inner.config}
    outer.tensors = {f"language_model.{name}": t for name, t in inner.tensors.items()}
    assert np.array_equal(logits(built(outer), chain(PROMPT)), ours(model))


def test_qwen3_5_inside_a_multimodal_model() -> None:
    model = hf_model("Qwen3_5", **GATED_DELTA)
    inner = checkpoint_of(model)
    text = {key: value for key, value in inner.config.items() if key != "architectures"}
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
    }
    outer = checkpoint_of(model)
    outer.config = config
    outer.tensors = {
        name.replace("model.", "model.language_model.", 1): t for name, t in inner.tensors.items()
    }
    assert np.array_equal(logits(built(outer), chain(PROMPT)), ours(model))


def test_nemotron_h_as_it_is_saved(tmp_path: Any) -> None:
    """Saved files have other names, and an object in place of infinity."""
    model = hf_model("NemotronH", **NEMOTRON_H)
    model.save_pretrained(tmp_path)
    stored = checkpoint_of(model)
    stored.tensors = load_file(tmp_path / "model.safetensors")
    stored.config = json.loads((tmp_path / "config.json").read_text())
    assert stored.config["time_step_limit"][1] == {"__float__": "Infinity"}
    assert np.array_equal(logits(built(stored), chain(PROMPT)), ours(model))
    del stored.config["layers_block_type"]
    stored.config["hybrid_override_pattern"] = "M-*-"
    assert np.array_equal(logits(built(stored), chain(PROMPT)), ours(model))
    stored.config["hybrid_override_pattern"] = "M-*X"
    with pytest.raises(CheckpointError, match="hybrid_override_pattern is 'M-[*]X'"):
        built(stored)
    stored.config["hybrid_override_pattern"] = "ME*-"
    with pytest.raises(CheckpointError, match="layers.1.mlp.gate.weight is missing"):
        built(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok is 3; allowed is 2"),
        ({"router_jitter_noise": -0.1}, "router_jitter_noise is -0.1; allowed is"),
        ({"router_jitter_noise": "x"}, "router_jitter_noise is 'x'; allowed is"),
    ],
)
def test_invalid_routing_of_phimoe_is_refused(change: dict[str, Any], message: str) -> None:
    model = hf_model("Phimoe", **CASES["phimoe"][1])
    with pytest.raises(CheckpointError, match=message):
        built(checkpoint_of(model, **change))


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    """GLM-4.5's checkpoints have a layer after the last one; it is not part of the model."""
    model = hf_model("Glm4Moe", **CASES["glm4 moe"][1])
    stored = checkpoint_of(model, num_nextn_predict_layers=1)
    extra = {"model.layers.3.eh_proj.weight": np.zeros((48, 96), np.float32)}
    stored.tensors = {**stored.tensors, **extra}
    assert np.array_equal(logits(built(stored), chain(PROMPT)), ours(model))
    stored.config["num_nextn_predict_layers"] = 0
    with pytest.raises(CheckpointError, match="contains more layers"):
        built(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 3}, "num_groups is 3; allowed is a divisor of the 8 experts"),
        ({"n_group": 8, "topk_group": 8}, "num_groups is 8; allowed is a divisor of the 8"),
        ({"n_group": 2, "topk_group": 3}, "groups_per_token is 3"),
        ({"topk_group": 1}, "experts_per_token is 3; allowed is at most the 2 experts"),
        ({"routed_scaling_factor": "x"}, "routed_scaling_factor is 'x'"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor is nan"),
        ({"n_shared_experts": -1}, "n_shared_experts is -1"),
        ({"n_shared_experts": 3}, r"gate_proj.weight has shape \(48, 48\), not \(72, 48\)"),
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace is '1'"),
        ({"first_k_dense_replace": 0}, "layers.0.mlp.gate.weight is missing"),
        ({"use_qk_norm": 1}, "use_qk_norm is 1"),
        ({"num_nextn_predict_layers": []}, "num_nextn_predict_layers is"),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0; allowed is null"),
    ],
)
def test_invalid_routers_end_in_one_line(change: dict[str, Any], message: str) -> None:
    stored = checkpoint_of(hf_model("Glm4Moe", **CASES["glm4 moe"][1]), **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        built(stored)
    assert "\n" not in str(caught.value)


def ours(model: Any) -> np.ndarray:
    return logits(own_model(model), chain(PROMPT))


def test_longer_context_uses_the_long_factors() -> None:
    """Beyond the original length, transformers uses the long factors for every position of an
    uncached pass. `Transformer` uses them from the start if the context allows such lengths."""
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 8, **LONG}
    model = hf_model("Llama", rope_parameters=scaling)
    expected = hf_logits(model, PROMPT)
    long = own_model(model, max_positions=64)
    assert np.abs(logits(long, chain(PROMPT)) - expected).max() < 1e-4
    short = own_model(model)
    assert short.spec.max_positions == 8
    assert np.abs(logits(short, chain(PROMPT)) - expected).max() > 1e-2


def test_dynamic_scaling_with_a_longer_context() -> None:
    scaling = {"rope_type": "dynamic", "factor": 3.0}
    model = hf_model("Llama", rope_parameters=scaling, max_position_embeddings=32)
    tokens = (PROMPT * 8)[:48]
    expected = hf_logits(model, tokens)
    assert np.abs(logits(own_model(model, max_positions=48), chain(tokens)) - expected).max() < 1e-4
    assert np.abs(logits(own_model(model), chain(tokens)) - expected).max() > 1e-2


def test_embedding_scale_is_rounded_like_the_model() -> None:
    config = {**checkpoint_of(hf_model("Gemma2", head_dim=16)).config, "dtype": "bfloat16"}
    assert spec_from_config(config).embedding_scale == 6.9375
    assert spec_from_config(config, dtype="float32").embedding_scale == pytest.approx(48**0.5)


@pytest.mark.parametrize("name", [
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.2.input_layernorm.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.layers.0.self_attn.k_proj.bias",
])  # fmt: skip
def test_a_missing_tensor_is_named(name: str) -> None:
    stored = checkpoint_of(hf_model("Llama", attention_bias=True))
    stored.tensors = {key: value for key, value in stored.tensors.items() if key != name}
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        built(stored)


def test_a_tensor_of_wrong_shape_is_named() -> None:
    stored = checkpoint_of(hf_model("Llama"))
    name = "model.layers.1.mlp.up_proj.weight"
    stored.tensors = {**stored.tensors, name: np.zeros((80, 40), np.float32)}
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(80, 40\), not \(80, 48\)"):
        built(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "rwkv"}, "model type 'rwkv'"),
        ({"hidden_act": "mish"}, "activation 'mish'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope scaling 'spiral'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_key_value_heads": 3}, "a divisor of the 4 heads"),
    ],
)
def test_unsupported_configs_are_rejected(change: dict[str, Any], message: str) -> None:
    config = {**checkpoint_of(hf_model("Llama")).config, **change}
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(config)


def test_an_unknown_dtype_is_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="int3"):
        own_model(hf_model("Llama"), "int3")


@pytest.mark.parametrize(
    ("dtype", "formats", "margin"),
    [
        ("bfloat16", ("BF16", "BF16"), 0.3),
        ("int8", ("Q8_0", "Q8_0"), 0.3),
        ("int4", ("Q4_0", "Q8_0"), 3.0),
    ],
)
def test_number_formats(dtype: str, formats: tuple[str, str], margin: float) -> None:
    """Converted weights have the requested format and stay close to the float32 model."""
    settings = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.1}
    model = hf_model("Llama", **settings)
    small = own_model(model, dtype)
    layer = small.network.weights.layers[0]
    assert (layer.query.weight.format, small.network.weights.head.format) == formats
    difference = np.abs(logits(small, chain(PROMPT)) - ours(model)).max()
    assert 0 < difference < margin


def test_packed_weights_stay_packed() -> None:
    """A fused packed matrix is split by rows, without unpacking it."""
    model = hf_model("Phi3", hidden_size=64, intermediate_size=96)
    stored = checkpoint_of(model)
    name = "model.layers.0.self_attn.qkv_proj"
    packed = quantize(stored.tensors[f"{name}.weight"], "Q4_1", name)
    stored.tensors = {**stored.tensors, f"{name}.weight": packed}
    layer = built(stored).network.weights.layers[0]
    parts = [layer.query.weight, layer.key.weight, layer.value.weight]
    assert [part.format for part in parts] == ["Q4_1"] * 3
    assert [part.name.rsplit(".", 1)[1] for part in parts] == ["q_proj", "k_proj", "v_proj"]
    assert np.array_equal(np.concatenate([part.data for part in parts]), packed.data)
    assert all(np.shares_memory(part.data, packed.data) for part in parts)


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("mistral", {"sliding_window": 8}),
    "attention softcap": ("gemma2", {"attn_logit_softcapping": None}),
    "final softcap": ("gemma2", {"final_logit_softcapping": None}),
    "query scale": ("gemma2", {"query_pre_attn_scalar": 16}),
    "local theta": (
        "gemma3",
        {
            "rope_parameters": {
                kind: {"rope_theta": 1e6} for kind in ("full_attention", "sliding_attention")
            }
        },
    ),
    "nope": ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    "expert norm": ("qwen3 moe", {"norm_topk_prob": False}),
    "eps": ("llama", {"rms_norm_eps": 1e-2}),
    "embedding factor": ("granite", {"embedding_multiplier": 1.0}),
    "residual factor": ("granite", {"residual_multiplier": 1.0}),
    "attention factor": ("granite", {"attention_multiplier": 0.25}),
    "logit factor": ("granite", {"logits_scaling": 1.0}),
    "rotary size": ("glm4", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    "global rope": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "jitter": ("phimoe", {"router_jitter_noise": 0.0}),
    "window beside recurrences": ("recurrent gemma", {"attention_window_size": 6}),
    "cap of logits": ("recurrent gemma", {"logits_soft_cap": 1.0}),
    "half of the rotation": (
        "recurrent gemma",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "step limit": ("mamba2", {"time_step_limit": [0.0, 0.5]}),
    "norms of gates": (
        "falcon mamba",
        {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
    ),
    "experts per token": ("jamba", {"num_experts_per_tok": 3}),
    "normalised experts": ("jamba", {"norm_topk_prob": True}),
    "epsilon of norms": ("jamba", {"rms_norm_eps": 1e-1}),
    "epsilon of gates": ("falcon mamba", {"mixer_rms_eps": 1.0}),
    "growth": ("ministral3", {"rope_parameters": {**MINISTRAL_3, "llama_4_scaling_beta": 0.0}}),
    "routed scale": ("glm4 moe", {"routed_scaling_factor": 1.0}),
    "groups": ("glm4 moe", {"topk_group": 4}),
    "top k": ("glm4 moe", {"num_experts_per_tok": 2}),
    "partial rotary": ("glm4 moe", {"partial_rotary_factor": 1.0, "rope_parameters": None}),
    "groups by the largest score": ("deepseek v2", {"topk_method": "greedy"}),
    "context scale": ("deepseek v3", {"rope_parameters": {**DEEPSEEK_ROPE, "mscale_all_dim": 0.7}}),
    "rotary pairs": ("deepseek v3", {"rope_interleave": False}),
    "proportional rope": (
        "gemma4 keys as values",
        {"rope_parameters": {**GEMMA_4_ROPE, "full_attention": {"rope_theta": 1e5}}},
    ),
    "window beside shared caches": ("gemma4", {"sliding_window": 7}),
    "experts beside the mlp": ("gemma4 experts", {"top_k_experts": 2}),
    "active stream": ("gemma3n odd", {"altup_active_idx": 0}),
    "scale of corrections": ("gemma3n", {"altup_correct_scale": False}),
    "sparsity": ("gemma3n", {"activation_sparsity_pattern": [0.95, 0.7, 0.35, 0.0, 0.0, 0.0]}),
    "chunks": ("llama4", {"attention_chunk_size": 9}),
    "growth of queries": ("llama4", {"attn_scale": 0.3}),
    "period of growth": ("llama4", {"floor_scale": 6}),
    "temperature": ("llama4", {"attn_temperature_tuning": False}),
    "layers without rope": ("llama4 dense", {"no_rope_layers": [1, 0, 1, 1]}),
    "norms of queries": ("llama4 plain", {"use_qk_norm": False}),
    "top one": ("llama4 dense", {"num_experts_per_tok": 1}),
    "slopes": ("mpt", {"attn_config": {"alibi_bias_max": 16}}),
    "qkv limit": ("mpt odd", {"attn_config": {**MPT_ATTENTION, "clip_qkv": 1.0}}),
    "softmax scale": ("mpt odd", {"attn_config": {**MPT_ATTENTION, "softmax_scale": None}}),
    "swiglu limit": ("gpt oss", {"swiglu_limit": 0.2}),
    "swiglu alpha": ("gpt oss", {"swiglu_alpha": 1.0}),
    "swiglu limit beside experts": ("minimax m3", {"swiglu_limit": 1.0}),
    "scale of experts": ("laguna elements", {"moe_routed_scaling_factor": 1.0}),
    "rotation of windows": (
        "laguna",
        {"rope_parameters": {**LAGUNA["rope_parameters"], "sliding_attention": {}}},
    ),
    "no gates": ("lfm3", {"use_attention_gate": False}),
    "base of a layer": ("granite swa bases", {"layer_rope_theta": [0, 500.0, 500.0]}),
    "rotation of a layer": ("granite swa bases", {"layer_rope_theta": [50.0, 500.0, 5000.0]}),
    "sum of experts": ("cohere2 moe", {"shared_expert_combination_strategy": "sum"}),
    "scores of experts": ("cohere2 moe", {"expert_selection_fn": "softmax"}),
    "rotation of dense layers": ("cohere2 moe", {"prefix_dense_sliding_window_pattern": 2}),
    "the activation of a shared block": ("zamba", {"hidden_act": "silu"}),
    "epsilon beside heads of mamba": ("zamba", {"rms_norm_eps": 1e-5}),
    "positions in shared blocks": ("zamba 2 odd", {"use_mem_rope": False}),
    "updates of shared blocks": ("zamba 2 odd", {"use_shared_attention_adapter": False}),
    "the activation of shared blocks": ("zamba 2", {"hidden_act": "silu"}),
    "strengths of twice a sigmoid": ("olmo hybrid", {"linear_allow_neg_eigval": False}),
    "a limit of decays": ("ling 3", {"kda_safe_gate": False}),
    "another limit of decays": ("ling 3", {"kda_lower_bound": -5.0}),
    "scale of embeddings": ("xglm", {"scale_embedding": False}),
    "limit of queries and keys": (
        "dbrx",
        {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.3, "rope_theta": 1e4}},
    ),
    "activation of bitnet": ("bitnet", {"hidden_act": "silu"}),
    "window of flint": ("flint", {"sliding_window": 7}),
    "eps of a norm of outputs": ("axk1 listed", {"rms_norm_eps": 1e-6}),
    "layers with experts": ("axk1", {"n_group": 1, "topk_group": 1}),
    "scale of embeddings of a stack": ("hrm text odd", {"embedding_scale": 2.0}),
    "cycles of a stack": ("hrm text", {"H_cycles": 1, "L_cycles": 5}),
    "window of latents": ("dots3 note", {"sliding_window": 7}),
    "ranks that are not scaled": ("dots3 note", {"apply_mla_qkv_lora_rescale": False}),
    "eps of differences": ("diffllama odd", {"rms_norm_eps": 1e-5}),
    "rotation in all layers": (
        "cohere compass",
        {"rope_parameters": {"sliding_attention": COMPASS_ROPE, "full_attention": COMPASS_ROPE}},
    ),
    "scale of logits": ("cohere compass", {"logit_scale": None}),
    "base of mllama": ("mllama", {"rope_parameters": ROPE}),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_settings_change_the_logits(mistake: str) -> None:
    """Negative controls: with one wrong setting, the logits exceed the margin of the tests
    above."""
    case, wrong = MISTAKES[mistake]
    family, settings = CASES[case]
    theirs = hf_model(family, **settings)
    tokens = (PROMPT * 3)[:24]
    expected = hf_logits(theirs, tokens)
    assert np.abs(logits(own_model(theirs), chain(tokens)) - expected).max() < 1e-4
    wrong_model = built(checkpoint_of(theirs, **wrong))
    assert np.abs(logits(wrong_model, chain(tokens)) - expected).max() > 1e-3


#: Changes of a model, each of one mechanism. The parts of the weights that a wrong twin
#: ignores or mixes up are set to what it would compute with.
WRONG_TWINS: dict[str, tuple[str, Callable[[Network], None]]] = {
    "keys of one head of mamba for all": ("zamba", lambda network: _same_keys(network)),
    "shared blocks in another order": ("zamba 2 odd", lambda network: _swap_blocks(network)),
    "experts without a norm of outputs": (
        "axk1",
        lambda network: _each_spec(network, has_output_norm=False),
    ),
    "no bias of the router": ("axk1", lambda network: _without_selection_bias(network)),
    "norms of attention without gates": (
        "axk2",
        lambda network: _each_gate(network, attention_norm_gate=0),
    ),
    "norms of experts without gates": (
        "axk2",
        lambda network: _each_gate(network, mlp_norm_gate=0),
    ),
    "gates of the attention of ones": (
        "axk2",
        lambda network: [_zero_matrix(layer.attention_gate) for layer in network.weights.layers],
    ),
    "queries of normed numbers alone": ("axk2", lambda network: _without_raw(network)),
    "a low state that starts with zeros": (
        "hrm text",
        lambda network: setattr(network.weights, "memory_start", None),
    ),
    "stacks without norms of their states": (
        "hrm text",
        lambda network: _each_spec(network, ends_loop=False),
    ),
    "one state for both stacks": ("hrm text", lambda network: _join_states(network)),
    "keys with positions without a norm": (
        "dots3 note",
        lambda network: _without_rotary_norm(network),
    ),
    "pairs of heads in sequence": ("diffllama", lambda network: _swap_heads(network)),
    "one map of attention": ("diffllama", lambda network: _without_differences(network)),
    "rotary pairs of Command R7B": ("cohere compass", lambda network: _interleave(network)),
    "norms of outputs in GPT": ("openai gpt", lambda network: _each_spec(network, norms="post")),
    "no norms that heads share": (
        "persimmon",
        lambda network: _each_spec(network, qk_norm=None),
    ),
    "waves from the first row": ("xglm", lambda network: _move_positions(network)),
    "latent attention without gates": (
        "ling 3",
        lambda network: _each(network, attention_gate=None),
    ),
    "inner norms of ones": (
        "bitnet",
        lambda network: _each(network, attention_inner_norm=np.ones(48, np.float32)),
    ),
    "inner norms of MLPs without weights": (
        "bitnet",
        lambda network: _each(network, mlp_inner_norm=np.ones(80, np.float32)),
    ),
    "sigmoids for softplus": (
        "laguna",
        lambda network: _each_spec(network, attention_gate="sigmoid"),
    ),
    "no sinks of flint": (
        "flint",
        lambda network: _each(network, sinks=np.full(4, -1e9, np.float32)),
    ),
    "rotation in layers without windows": (
        "flint",
        lambda network: _each_spec(network, rope=network.spec.layers[1].rope),
    ),
    "no sinks beside windows": (
        "granite swa",
        lambda network: _each(network, sinks=np.full(4, -1e9, np.float32)),
    ),
    "a rotation the usual way": (
        "nanochat",
        lambda network: _each_spec(network, rope=Rope(-network.spec.layers[0].rope.frequencies)),
    ),
    "no embeddings of tokens per layer": ("gemma4", lambda network: _zero_table(network)),
    "keys and values of the first layer of the type": (
        "gemma4",
        lambda network: _share(network, {3: 0, 4: 0, 5: 2}),
    ),
    "no low-rank residual": ("gemma3n", lambda network: _zero(network, "residual_norm")),
    "no prediction": ("gemma3n", lambda network: _zero(network, "prediction")),
    "correction without one": ("gemma3n", lambda network: _zero(network, "correction")),
    "no threshold of gates": (
        "gemma3n",
        lambda network: _each_spec(network, gate_cutoff=None),
    ),
    "the last states of the first stream": (
        "gemma3n",
        lambda network: _zero_last(network),
    ),
    "weights of outputs": (
        "llama4",
        lambda network: _each_spec(
            network, routing=replace(network.spec.layers[0].routing, scales_inputs=False)
        ),
    ),
    "growth from position 0": (
        "llama4",
        lambda network: object.__setattr__(network.spec.layers[3].query_rope, "growth_start", 0),
    ),
    "a choice of experts by biased scores": (
        "kolibri",
        lambda network: _each_spec(
            network, routing=replace(network.spec.layers[0].routing, by_logits=False)
        ),
    ),
    "experts of attention in another order": (
        "jetmoe",
        lambda network: _each_layer(
            network,
            lambda layer: layer.attention_experts.outputs.reverse(),
        ),
    ),
    "an epsilon for all norms": (
        "jetmoe odd",
        lambda network: setattr(network, "spec", replace(network.spec, final_norm_eps=None)),
    ),
    "routers that read no others": (
        "zaya",
        lambda network: _each_layer(
            network,
            lambda layer: (
                layer.router_states.factors is not None and layer.router_states.factors.fill(0)
            ),
        ),
    ),
    "one convolution": (
        "zaya",
        lambda network: _each_layer(network, lambda layer: layer.convolved.before.fill(0)),
    ),
    "values without a delay": (
        "zaya",
        lambda network: _each_layer(network, lambda layer: _zero_matrix(layer.convolved.delayed)),
    ),
    "sums without biases": (
        "zaya",
        lambda network: _each_layer(network, lambda layer: setattr(layer, "mlp_sum_bias", None)),
    ),
    "gates with another limit": (
        "xlstm odd",
        lambda network: _each_layer(
            network, lambda layer: setattr(layer.recurrent, "gate_cap", 15.0)
        ),
    ),
    "gates exchanged": (
        "xlstm",
        lambda network: _each_layer(
            network,
            lambda layer: vars(layer.recurrent).update(
                input_gate=layer.recurrent.forget_gate, forget_gate=layer.recurrent.input_gate
            ),
        ),
    ),
    "keys without biases": (
        "doge",
        lambda network: _each_layer(
            network, lambda layer: setattr(layer.key_bias, "rates", layer.key_bias.rates - 30)
        ),
    ),
    "sums without factors": (
        "doge",
        lambda network: _each_layer(
            network, lambda layer: setattr(layer, "mlp_residual", 0 * layer.mlp_residual + 1)
        ),
    ),
    "norms in layers without rotation": (
        "llama4",
        lambda network: _each_spec(network, qk_norm="plain"),
    ),
    "gates as stored": ("recurrent gemma", lambda network: _transpose_blocks(network)),
    "gates without biases": (
        "recurrent gemma",
        lambda network: _each_vector(network, step_bias=lambda bias: 0 * bias),
    ),
    "a decay without its factor": (
        "recurrent gemma",
        lambda network: _each_vector(network, decay=lambda decay: decay / 8),
    ),
    "a convolution without a bias": (
        "recurrent gemma",
        lambda network: _each_vector(network, conv_bias=lambda bias: 0 * bias),
    ),
    "embeddings without a factor": (
        "recurrent gemma",
        lambda network: setattr(network, "spec", replace(network.spec, embedding_scale=1.0)),
    ),
    "no matrix in front of the head's": (
        "modernbert decoder",
        lambda network: setattr(network.weights, "head_dense", None),
    ),
    "windows as wide as the key says": (
        "modernbert decoder",
        lambda network: _each_shape(network, window=12),
    ),
    "no linear biases": ("bloom", lambda network: _each_shape(network, slopes=None)),
    "linear biases that are not scaled": (
        "falcon linear biases",
        lambda network: _each_shape(network, slopes=alibi_slopes(4)),
    ),
    "rotation beside linear biases": (
        "falcon linear biases",
        lambda network: _each_spec(network, rope=Rope(np.ones(6, np.float32))),
    ),
    "one activation in all layers": ("apertus", lambda network: _same_activation(network)),
    "no exponential below 0": (
        "apertus",
        lambda network: _each(network, xielu=network.weights.layers[0].xielu._replace(eps=-1e3)),
    ),
    "norms of outputs in place of sums": (
        "opt norms of sums",
        lambda network: _each_spec(network, norms="post"),
    ),
    "the projection of the embedding for the head": (
        "opt projections",
        lambda network: setattr(network.weights, "head", network.weights.embedding),
    ),
    "norms of gates without weights": ("jamba", lambda network: _plain_gate_norms(network)),
    "the table from its first row": ("opt", lambda network: _move_positions(network)),
    "slopes of a power of two": (
        "bloom odd",
        lambda network: _each_shape(
            network, slopes=tuple(2.0 ** (-8 * i / 12) for i in range(1, 13))
        ),
    ),
    "embeddings without a norm": (
        "bloom",
        lambda network: setattr(network, "spec", replace(network.spec, has_embedding_norm=False)),
    ),
    "the norm of the first head for all": (
        "cohere norms",
        lambda network: _same_head_norms(network),
    ),
    "no norms of heads": ("stablelm norms", lambda network: _each_spec(network, qk_norm=None)),
    "one norm of all heads": (
        "stablelm norms",
        lambda network: _each_spec(network, qk_norm="full"),
    ),
    "no scale of layers": ("gemma4", lambda network: _each(network, scale=1.0)),
    "values without a norm": ("gemma4", lambda network: _each_spec(network, has_value_norm=False)),
    "experts without factors": ("gemma4 experts", lambda network: _without_factors(network)),
    "router with the experts' norm": ("gemma4 experts", lambda network: _same_norm(network)),
}


def _transpose_blocks(network: Network) -> None:
    for layer in network.weights.layers:
        blocks = getattr(layer.recurrent, "input_blocks", [])
        for block in blocks:
            block.data = np.ascontiguousarray(block.data.T)


def _each_vector(network: Network, **changes: Callable[[np.ndarray], np.ndarray]) -> None:
    for layer in network.weights.layers:
        for name, change in changes.items():
            if isinstance(layer.recurrent, RecurrentWeights):
                vectors = layer.recurrent.vectors
                setattr(vectors, name, change(getattr(vectors, name)))


def _each(network: Network, **changes: Any) -> None:
    for layer in network.weights.layers:
        for name, value in changes.items():
            setattr(layer, name, value)


def _each_layer(network: Network, change: Callable[[Any], None]) -> None:
    for layer in network.weights.layers:
        change(layer)


def _swap_blocks(network: Network) -> None:
    """Exchange the MLPs of the first two layers."""
    first, second = network.weights.layers[:2]
    first.mlp, second.mlp = second.mlp, first.mlp


def _each_spec(network: Network, **changes: Any) -> None:
    layers = tuple(replace(layer, **changes) for layer in network.spec.layers)
    network.spec = replace(network.spec, layers=layers)


def _same_head_norms(network: Network) -> None:
    for shape, layer in zip(network.spec.layers, network.weights.layers, strict=True):
        assert shape.attention is not None and layer.query_norm is not None
        first = layer.query_norm[: shape.attention.head_dim]
        layer.query_norm = np.tile(first, shape.attention.num_heads)


def _zero(network: Network, name: str) -> None:
    """Set a matrix or a norm of each layer's streams to zero, or the bias of the correction."""
    for layer in network.weights.layers:
        value = getattr(layer.streams, name)
        if name == "correction":
            value.bias = None
        else:
            (value if isinstance(value, np.ndarray) else value.weight.data)[:] = 0


def _zero_last(network: Network) -> None:
    assert network.weights.streams is not None
    for linear in network.weights.streams.last:
        linear.weight.data[:] = 0


def _each_shape(network: Network, **changes: Any) -> None:
    for layer in network.spec.layers:
        assert layer.attention is not None
        object.__setattr__(layer, "attention", replace(layer.attention, **changes))


def _share(network: Network, sources: dict[int, int]) -> None:
    layers = [
        replace(layer, cache_layer=sources.get(index))
        for index, layer in enumerate(network.spec.layers)
    ]
    network.spec = replace(network.spec, layers=tuple(layers))


def _same_activation(network: Network) -> None:
    _each(network, xielu=network.weights.layers[0].xielu)


def _plain_gate_norms(network: Network) -> None:
    for layer in network.weights.layers:
        if isinstance(layer.recurrent, RecurrentWeights):
            layer.recurrent.gate_norms = []


def _move_positions(network: Network) -> None:
    table = network.weights.position_table
    assert table is not None
    table.data = np.roll(table.data, 2, 0)


def _without_selection_bias(network: Network) -> None:
    for layer in network.weights.layers:
        if isinstance(layer.mlp, Experts):
            layer.mlp.routed.selection_bias = None


def _each_gate(network: Network, **changes: int) -> None:
    for name in changes:
        for layer in network.weights.layers:
            setattr(layer, name, None)
    _each_spec(network, **changes)


def _zero_matrix(linear: Any) -> None:
    linear.weight.data[:] = 0


def _without_raw(network: Network) -> None:
    for layer in network.weights.layers:
        assert layer.query is not None
        layer.query.weight.data[:, layer.query.weight.in_features // 2 :] = 0


def _same_keys(network: Network) -> None:
    """Each head of Mamba has the keys of the first one."""
    for layer in network.weights.layers:
        assert isinstance(layer.recurrent, RecurrentWeights) and layer.recurrent.keys is not None
        keys = layer.recurrent.keys.weight.data
        keys[len(keys) // 2 :] = keys[: len(keys) // 2]


def _join_states(network: Network) -> None:
    layers = [
        replace(layer, memory="joins") if layer.memory == "swaps" and index else layer
        for index, layer in enumerate(network.spec.layers)
    ]
    network.spec = replace(network.spec, layers=tuple(layers))


def _without_rotary_norm(network: Network) -> None:
    for layer in network.weights.layers:
        assert layer.latent is not None
        layer.latent.rotary_norm = None


def _swap_heads(network: Network) -> None:
    """The queries in the order in which they are stored."""
    for spec, layer in zip(network.spec.layers, network.weights.layers, strict=True):
        assert layer.query is not None
        weight, order = layer.query.weight, spec.query_order()
        weight.data = np.ascontiguousarray(weight.data[np.argsort(order)])


def _without_differences(network: Network) -> None:
    for layer in network.weights.layers:
        assert layer.differential is not None
        layer.differential.factor = 0.0


def _interleave(network: Network) -> None:
    """Rotary pairs that are next to each other."""
    for spec, layer in zip(network.spec.layers, network.weights.layers, strict=True):
        if spec.rope is not None:
            assert layer.query is not None and layer.key is not None
            own = replace(spec, interleaved_rope=True)
            for linear, order in ((layer.query, own.query_order()), (layer.key, own.key_order())):
                linear.weight.data = np.ascontiguousarray(linear.weight.data[order])


def _zero_table(network: Network) -> None:
    assert network.weights.per_layer is not None
    network.weights.per_layer.table.data[:] = 0


def _without_factors(network: Network) -> None:
    for layer in network.weights.layers:
        assert isinstance(layer.mlp, Experts)
        layer.mlp.routed.factors = None


def _same_norm(network: Network) -> None:
    for layer in network.weights.layers:
        assert isinstance(layer.mlp, Experts) and layer.mlp.norms is not None
        layer.mlp.norms.router = layer.mlp.norms.input


@pytest.mark.one_in(2)
@pytest.mark.parametrize("twin", WRONG_TWINS)
def test_wrong_twins_change_the_logits(twin: str) -> None:
    case, change = WRONG_TWINS[twin]
    family, settings = CASES[case]
    theirs = hf_model(family, **settings)
    tokens = (PROMPT * 3)[:24]
    network = load_network(copied(checkpoint_of(theirs)))
    change(network)
    model = Transformer(network, executor=torch_executor())
    assert np.abs(logits(model, chain(tokens)) - hf_logits(theirs, tokens)).max() > 1e-3


def copied(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with tensors that may be written to."""
    tensors = {name: np.array(tensor) for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_equal_router_scores_choose_the_lower_experts(backend: str, tmp_path: Any) -> None:
    """With a router of zeros, the first two of four experts run for every row."""
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    theirs = hf_model("Qwen3Moe", **settings)
    theirs.save_pretrained(tmp_path)
    checkpoint, stored = checkpoint_of(theirs), load_file(tmp_path / "model.safetensors")

    def outputs(*changed: int) -> np.ndarray:
        """The logits of the model in which these experts give zeros."""
        zeros = tuple(f"mlp.experts.{expert}.down_proj.weight" for expert in changed)
        tensors = {
            name: np.zeros_like(tensor) if name.endswith(("mlp.gate.weight", *zeros)) else tensor
            for name, tensor in stored.items()
        }
        model = built(replace(checkpoint, tensors=tensors), executor=choose_executor(backend))
        return logits(model, chain(PROMPT))

    expected = outputs()
    assert np.array_equal(outputs(2, 3), expected)
    for expert in (0, 1):
        assert np.abs(outputs(expert) - expected).max() > 1e-3


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(
    ("family", "settings", "router"),
    [("Llama4", LLAMA_4, "router.weight"), ("Kolibri1", KOLIBRI, "mlp.gate.weight")],
)
def test_saturated_scores_choose_the_largest_logit(
    family: str, settings: dict[str, Any], router: str, backend: str
) -> None:
    """Wrong twin: a choice by scores, which are all 1."""
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    theirs = hf_model(family, **settings)
    for name, parameter in theirs.named_parameters():
        if name.endswith(router):
            parameter.data *= 100
    expected, network = hf_logits(theirs, PROMPT), load_network(checkpoint_of(theirs))
    found = logits(Transformer(network, executor=choose_executor(backend)), chain(PROMPT))
    assert np.abs(found - expected).max() < 1e-4
    network, routing = load_network(checkpoint_of(theirs)), network.spec.layers[0].routing
    assert routing is not None, "in every layer"
    _each_spec(network, routing=replace(routing, by_logits=False))
    found = logits(Transformer(network, executor=choose_executor(backend)), chain(PROMPT))
    assert np.abs(found - expected).max() > 1e-2
