"""Small models of several families as folders: the bases of the folders that are fuzzed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.models.families.table import FAMILIES
from fuzz.layouts import write_layouts
from fuzz.quantized import write_quantized
from gguf_models import write_folder
from model_files import EXPERT_CONFIG, expert_tensors, tokenizer_json

_OUTER: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (40, 64),
    "model.norm.weight": (64,),
    "lm_head.weight": (40, 64),
}
_NORMS = {"input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,)}
_SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_LEAVES, _GATES = ("weight", "bias"), ("input", "recurrent")
_LATENT: dict[str, tuple[int, ...]] = {
    **_NORMS,
    "self_attn.q_a_proj.weight": (24, 64),
    "self_attn.q_a_layernorm.weight": (24,),
    "self_attn.q_b_proj.weight": (72, 24),
    "self_attn.kv_a_proj_with_mqa.weight": (40, 64),
    "self_attn.kv_a_layernorm.weight": (32,),
    "self_attn.kv_b_proj.weight": (88, 32),
    "self_attn.o_proj.weight": (64, 48),
}
_HYBRID: dict[str, tuple[int, ...]] = {
    **_NORMS,
    "shared_mlp.input_linear.weight": (192, 64),
    "shared_mlp.output_linear.weight": (64, 96),
}
_GATED: dict[str, tuple[int, ...]] = {
    **_NORMS,
    "mlp.gate.weight": (4, 64),
    "mlp.experts.gate_up_proj": (4, 64, 64),
    "mlp.experts.down_proj": (4, 64, 32),
    "mlp.shared_expert.gate_proj.weight": (32, 64),
    "mlp.shared_expert.up_proj.weight": (32, 64),
    "mlp.shared_expert.down_proj.weight": (64, 32),
    "mlp.shared_expert_gate.weight": (1, 64),
}
_SELECTIVE: dict[str, tuple[int, ...]] = {
    "norm.weight": (64,),
    "mixer.A_log": (96, 12),
    "mixer.D": (96,),
    "mixer.conv1d.weight": (96, 1, 4),
    "mixer.conv1d.bias": (96,),
    "mixer.in_proj.weight": (192, 64),
    "mixer.x_proj.weight": (29, 96),
    "mixer.dt_proj.weight": (96, 5),
    "mixer.dt_proj.bias": (96,),
    "mixer.out_proj.weight": (64, 96),
}
_TIME_MIX: dict[str, tuple[int, ...]] = {
    **{f"{name}.{leaf}": (64,) for name in ("attn_norm", "ffn_norm") for leaf in _LEAVES},
    **{f"attn.g_norm.{leaf}": (64,) for leaf in _LEAVES},
    **{f"attn.x_{part}": (1, 1, 64) for part in "rwkvag"},
    **{f"attn.{part}_proj.weight": (64, 64) for part in "rkvo"},
    **{f"attn.{part}_lora.lora.0.weight": (6, 64) for part in "wavg"},
    **{f"attn.{part}_lora.lora.2.weight": (64, 6) for part in "wavg"},
    **{f"attn.{part}_lora.lora.2.bias": (64,) for part in "wav"},
    "attn.k_k": (64,),
    "attn.k_a": (64,),
    "attn.r_k": (4, 16),
    "ffn.x_k": (64,),
    "ffn.key.weight": (96, 64),
    "ffn.value.weight": (64, 96),
}
_LRU_NORMS: dict[str, tuple[int, ...]] = {
    "temporal_pre_norm.weight": (64,),
    "channel_pre_norm.weight": (64,),
    **{f"mlp_block.{part}_proj.weight": (48, 64) for part in ("gate", "up")},
    **{f"mlp_block.{part}_proj.bias": (48,) for part in ("gate", "up")},
    "mlp_block.down_proj.weight": (64, 48),
    "mlp_block.down_proj.bias": (64,),
}
_LRU: dict[str, tuple[int, ...]] = {
    **_LRU_NORMS,
    **{f"temporal_block.linear_{part}.weight": (64, 64) for part in ("x", "y", "out")},
    **{f"temporal_block.linear_{part}.bias": (64,) for part in ("x", "y", "out")},
    "temporal_block.conv_1d.weight": (64, 1, 4),
    "temporal_block.conv_1d.bias": (64,),
    "temporal_block.rg_lru.recurrent_param": (64,),
    **{f"temporal_block.rg_lru.{gate}_gate_weight": (4, 16, 16) for gate in _GATES},
    **{f"temporal_block.rg_lru.{gate}_gate_bias": (4, 16) for gate in _GATES},
}
_LOCAL: dict[str, tuple[int, ...]] = {
    **_LRU_NORMS,
    "temporal_block.q_proj.weight": (64, 64),
    "temporal_block.k_proj.weight": (32, 64),
    "temporal_block.v_proj.weight": (32, 64),
    "temporal_block.o_proj.weight": (64, 64),
    "temporal_block.o_proj.bias": (64,),
}
_ATTENTION: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
}
_STREAMS: dict[str, tuple[int, ...]] = {
    **_NORMS,
    "pre_feedforward_layernorm.weight": (64,),
    "post_feedforward_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.q_norm.weight": (16,),
    "self_attn.o_proj.weight": (64, 64),
    "per_layer_input_gate.weight": (8, 64),
    "per_layer_projection.weight": (64, 8),
    "post_per_layer_input_norm.weight": (64,),
    "altup.modality_router.weight": (2, 64),
    "altup.router_norm.weight": (64,),
    "altup.prediction_coefs.weight": (4, 2),
    "altup.correction_coefs.weight": (2, 2),
    "altup.correct_output_scale": (64,),
    "laurel.linear_left.weight": (6, 64),
    "laurel.linear_right.weight": (64, 6),
    "laurel.post_laurel_norm.weight": (64,),
}
#: Tensors outside the layers that only some models have.
_MORE_OUTER: dict[str, dict[str, tuple[int, ...]]] = {
    "gemma3n_text": {
        "model.embed_tokens_per_layer.weight": (40, 16),
        "model.per_layer_model_projection.weight": (16, 64),
        "model.per_layer_projection_norm.weight": (8,),
        "model.altup_projections.0.weight": (64, 64),
        "model.altup_unembed_projections.0.weight": (64, 64),
    },
    "rwkv7": {"model.norm.bias": (64,)},
}
_MPT: dict[str, tuple[int, ...]] = {
    "norm_1.weight": (64,),
    "norm_2.weight": (64,),
    "attn.Wqkv.weight": (192, 64),
    "attn.out_proj.weight": (64, 64),
    "ffn.up_proj.weight": (128, 64),
    "ffn.down_proj.weight": (64, 128),
}
#: The names of the embedding, the final norm and the list of layers in a layout of its own.
_OWN_NAMES = {"mpt": ("transformer.wte", "transformer.norm_f", "transformer.blocks")}
#: By name: the config, and the shapes of the tensors of the two layers.
_FAMILIES: dict[str, tuple[dict[str, Any], tuple[dict[str, tuple[int, ...]], ...]]] = {
    "latent": (
        {
            **_SIZES,
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        (
            {
                **_LATENT,
                "mlp.gate_proj.weight": (96, 64),
                "mlp.up_proj.weight": (96, 64),
                "mlp.down_proj.weight": (64, 96),
            },
            {
                **_LATENT,
                "mlp.experts.gate_up_proj": (4, 64, 64),
                "mlp.experts.down_proj": (4, 64, 32),
                "mlp.gate.weight": (4, 64),
                "mlp.gate.e_score_correction_bias": (4,),
                "mlp.shared_experts.gate_proj.weight": (32, 64),
                "mlp.shared_experts.up_proj.weight": (32, 64),
                "mlp.shared_experts.down_proj.weight": (64, 32),
            },
        ),
    ),
    "hybrid": (
        {
            **_SIZES,
            "model_type": "granitemoehybrid",
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "intermediate_size": 32,
            "shared_intermediate_size": 96,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "position_embedding_type": "nope",
            "attention_multiplier": 0.25,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
        (
            {
                **_HYBRID,
                "mamba.dt_bias": (4,),
                "mamba.A_log": (4,),
                "mamba.D": (4,),
                "mamba.conv1d.weight": (192, 1, 4),
                "mamba.conv1d.bias": (192,),
                "mamba.in_proj.weight": (324, 64),
                "mamba.norm.weight": (128,),
                "mamba.out_proj.weight": (64, 128),
            },
            {**_HYBRID, **_ATTENTION},
        ),
    ),
    "gated": (
        {
            **_SIZES,
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            "head_dim": 16,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        (
            {
                **_GATED,
                "linear_attn.dt_bias": (4,),
                "linear_attn.A_log": (4,),
                "linear_attn.conv1d.weight": (128, 1, 4),
                "linear_attn.in_proj_qkvz.weight": (192, 64),
                "linear_attn.in_proj_ba.weight": (8, 64),
                "linear_attn.norm.weight": (16,),
                "linear_attn.out_proj.weight": (64, 64),
            },
            {
                **_GATED,
                **_ATTENTION,
                "self_attn.q_proj.weight": (128, 64),
                "self_attn.q_norm.weight": (16,),
                "self_attn.k_norm.weight": (16,),
            },
        ),
    ),
    "streams": (
        {
            **_SIZES,
            "model_type": "gemma3n_text",
            "architectures": ["Gemma3nForCausalLM"],
            "head_dim": 16,
            "intermediate_size": [96, 64],
            "layer_types": ["full_attention", "full_attention"],
            "sliding_window": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 40,
            "num_kv_shared_layers": 1,
            "laurel_rank": 6,
            "altup_num_inputs": 2,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
            "activation_sparsity_pattern": [0.9, 0.0],
            "final_logit_softcapping": 30.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        (
            {
                **_STREAMS,
                "mlp.gate_proj.weight": (96, 64),
                "mlp.up_proj.weight": (96, 64),
                "mlp.down_proj.weight": (64, 96),
                "self_attn.k_proj.weight": (32, 64),
                "self_attn.v_proj.weight": (32, 64),
                "self_attn.k_norm.weight": (16,),
            },
            {
                **_STREAMS,
                "mlp.gate_proj.weight": (64, 64),
                "mlp.up_proj.weight": (64, 64),
                "mlp.down_proj.weight": (64, 64),
            },
        ),
    ),
    "chunks": (
        {
            **_SIZES,
            "model_type": "llama4_text",
            "architectures": ["Llama4ForCausalLM"],
            "head_dim": 16,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 8,
            "attn_temperature_tuning": True,
            "floor_scale": 4,
            "attn_scale": 0.1,
            "use_qk_norm": True,
            "rope_theta": 10000.0,
        },
        (
            {
                **_NORMS,
                **_ATTENTION,
                "feed_forward.gate_proj.weight": (96, 64),
                "feed_forward.up_proj.weight": (96, 64),
                "feed_forward.down_proj.weight": (64, 96),
            },
            {
                **_NORMS,
                **_ATTENTION,
                "feed_forward.router.weight": (4, 64),
                "feed_forward.experts.gate_up_proj": (4, 64, 64),
                "feed_forward.experts.down_proj": (4, 32, 64),
                "feed_forward.shared_expert.gate_proj.weight": (32, 64),
                "feed_forward.shared_expert.up_proj.weight": (32, 64),
                "feed_forward.shared_expert.down_proj.weight": (64, 32),
            },
        ),
    ),
    "biases": (
        {
            "model_type": "mpt",
            "architectures": ["MPTForCausalLM"],
            "vocab_size": 40,
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "expansion_ratio": 2,
            "max_seq_len": 64,
            "no_bias": True,
            "norm_type": "low_precision_layernorm",
            "attn_config": {
                "alibi": True,
                "alibi_bias_max": 8,
                "attn_type": "multihead_attention",
                "clip_qkv": 6,
                "prefix_lm": False,
                "qk_ln": False,
                "softmax_scale": None,
            },
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
        (_MPT, _MPT),
    ),
    "selective": (
        {
            "model_type": "falcon_mamba",
            "architectures": ["FalconMambaForCausalLM"],
            "vocab_size": 40,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 96,
            "expand": 2,
            "state_size": 12,
            "conv_kernel": 4,
            "time_step_rank": 5,
            "use_bias": False,
            "use_conv_bias": True,
            "hidden_act": "silu",
            "layer_norm_epsilon": 1e-5,
            "mixer_rms_eps": 1e-6,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
        (_SELECTIVE, _SELECTIVE),
    ),
    "time mixing": (
        {
            "model_type": "rwkv7",
            "architectures": ["RWKV7ForCausalLM"],
            "vocab_size": 40,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 96,
            "head_dim": 16,
            "value_dim": [64, 64],
            **{f"{part}_low_rank_dim": 6 for part in ("decay", "gate", "a", "v")},
            "norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
        ({**_TIME_MIX, **{f"pre_norm.{leaf}": (64,) for leaf in _LEAVES}}, _TIME_MIX),
    ),
    "linear recurrence": (
        {
            **_SIZES,
            "model_type": "recurrent_gemma",
            "architectures": ["RecurrentGemmaForCausalLM"],
            "intermediate_size": 96,
            "lru_width": 64,
            "conv1d_width": 4,
            "attention_window_size": 8,
            "logits_soft_cap": 30.0,
            "block_types": ["recurrent", "attention"],
        },
        (_LRU, _LOCAL),
    ),
}
#: The folder whose tokenizer is that of most folders.
FIRST = "experts"


def write_folders(root: Path) -> dict[str, Path]:
    """Write a model of every family; the folders by name."""
    folders = {FIRST: write_folder(root / FIRST, expert_tensors(), **EXPERT_CONFIG)}
    generator = np.random.default_rng(0)
    for name, (config, layers) in _FAMILIES.items():
        names, shapes = FAMILIES[config["model_type"]].names, dict(_OUTER)
        usual = [f"model.{names.get(module, module)}" for module in ("embed_tokens", "norm")]
        *outer, blocks = _OWN_NAMES.get(config["model_type"], (*usual, "model.layers"))
        for module, own in zip(("embed_tokens", "norm"), outer, strict=True):
            shapes[f"{own}.weight"] = shapes.pop(f"model.{module}.weight")
        shapes |= _MORE_OUTER.get(config["model_type"], {})
        for number, layer in enumerate(layers):
            shapes |= {f"{blocks}.{number}.{key}": shape for key, shape in layer.items()}
        tensors = {
            key: 0.3 * generator.standard_normal(shape, np.float32) for key, shape in shapes.items()
        }
        folders[name] = write_folder(root / name, tensors, **config)
    folders |= write_layouts(root) | write_quantized(root)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {"chat_template": template, "eos_token": "c", "bos_token": {"content": "b"}}
    for folder in folders.values():
        if not (folder / "tokenizer_config.json").exists():
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folders
