"""The names of tensors in GGUF files, and those of Hugging Face that they stand for."""

from __future__ import annotations

OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",
    "output": "lm_head",
    "position_embd": "model.embed_positions",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
#: Modules outside the layers that have another meaning in one architecture.
OWN_OUTER = {"bloom": {"token_embd_norm": "model.embed_norm"}}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SANDWICH = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
#: Embeddings of tokens in every layer.
_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
#: The tensors of a layer that predicts further tokens beside those of other layers.
NEXTN = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
#: Several streams of hidden states.
_STREAMS = {
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
#: Stacks of matrices outside the layers.
STACKS = {
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
OVERRIDES = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma3n": {**_SANDWICH, **_PER_LAYER, **_STREAMS},
    "gemma4": {
        **_SANDWICH,
        **_PER_LAYER,
        "ffn_gate_inp": "router.proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    "olmo2": _POST_NORMS,
    "exaone4": _POST_NORMS,
    "glm4": {**_SANDWICH, "ffn_up": "mlp.gate_up_proj"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "gpt2": {"attn_qkv": "self_attn.qkv_proj"},
    "gptneox": {"attn_qkv": "self_attn.qkv_proj"},
    "falcon": {"attn_qkv": "self_attn.qkv_proj", "attn_norm_2": "input_layernorm"},
    "bloom": {"attn_qkv": "self_attn.qkv_proj"},
    "mpt": {"attn_qkv": "self_attn.qkv_proj"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate"},
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    "olmoe": {"ffn_gate_inp": "mlp.gate"},
    "lfm2": {
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    },
    "mamba": {
        "ssm_in": "mixer.in_proj",
        "ssm_conv1d": "mixer.conv1d",
        "ssm_x": "mixer.x_proj",
        "ssm_dt": "mixer.dt_proj",
        "ssm_out": "mixer.out_proj",
    },
    "qwen2moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    "glm4moe": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    "llama4": {
        "ffn_gate_inp": "feed_forward.router",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
}
_MLP_EXPERTS = {
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
}
EXPERTS = {
    "llama": {
        "ffn_gate": "block_sparse_moe.experts.{}.w1",
        "ffn_up": "block_sparse_moe.experts.{}.w3",
        "ffn_down": "block_sparse_moe.experts.{}.w2",
    },
    "gemma4": {part: name.removeprefix("mlp.") for part, name in _MLP_EXPERTS.items()},
    "llama4": {part: name.replace("mlp", "feed_forward") for part, name in _MLP_EXPERTS.items()},
    **dict.fromkeys(
        ("qwen2moe", "qwen3moe", "olmoe", "glm4moe", "gpt-oss", "deepseek2"), _MLP_EXPERTS
    ),
}
#: Stacks of matrices, one for each head, of latent attention.
HEADS = {
    "deepseek2": {
        "attn_k_b": "self_attn.k_b_proj.{}",
        "attn_v_b": "self_attn.v_b_proj.{}",
    }
}
#: Vectors whose Hugging Face names have no suffix.
VECTORS = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ssm_a": "mixer.A",
    "ssm_d": "mixer.D",
}
#: Vectors of one architecture that have the names of factors of a weight elsewhere, or no suffix.
OWN_VECTORS = {
    "gemma3n": {"altup_correct_scale.weight": "altup.correct_output_scale"},
    "gemma4": {
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "layer_output_scale.weight": "layer_scalar",
    },
}
#: Factors of a weight, which are read with it, and of activations, which are not used.
SCALES = ("scale", "input_scale")
#: Rope factors, which are read into the config.
IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: Architectures whose query and key rows are stored for interleaved rotary pairs.
INTERLEAVED = ("llama", "smollm3", "granite", "minicpm", "mistral3")


def is_own_vector(architecture: str, name: str) -> bool:
    """Whether a tensor is a vector of the layers of `architecture` that has the name of a factor of
    a weight in other files, or no suffix in Hugging Face's layout."""
    return name.split(".", 2)[-1] in OWN_VECTORS.get(architecture, {})
