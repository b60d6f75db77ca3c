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
OWN_OUTER = {
    **dict.fromkeys(
        (
            *("bloom", "rwkv6", "rwkv7", "bert", "nomic-bert", "nomic-bert-moe", "modern-bert"),
            *("jina-bert-v2", "jina-bert-v3"),
        ),
        {"token_embd_norm": "model.embed_norm", "token_types": "model.embed_segments"},
    ),
    **dict.fromkeys(("lfm2", "lfm2moe"), {"token_embd_norm": "model.norm"}),
    "kimi-k3": {"output_res_score": "model.output_attn_res_score"},
    "qwen4exp": {
        "output_hc_norm": "model.hyper_connection_mixer.hc_norm",
        "output_hc_down": "model.hyper_connection_mixer.input_mix_weight_down",
        "output_hc_up": "model.hyper_connection_mixer.input_mix_weight_up",
    },
    "diffusion-gemma": {
        "self_cond_pre_norm": "model.self_conditioning.pre_norm",
        **{
            f"self_cond_{part}": f"model.self_conditioning.{part}_proj"
            for part in ("gate", "up", "down")
        },
    },
}
#: Tensors outside the layers whose Hugging Face names have no suffix.
OUTER_VECTORS = {
    "hrm.z_l_init": "model.z_L_init",
    **{f"output_hc_{kind}.weight": f"model.hc_head.hc_{kind}" for kind in ("fn", "base", "scale")},
}
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
    "layer_output_norm": "final_layernorm",
    "nextn.hc_head_norm": "hyper_connection_mixer.hc_norm",
    "nextn.hc_head_down": "hyper_connection_mixer.input_mix_weight_down",
    "nextn.hc_head_up": "hyper_connection_mixer.input_mix_weight_up",
}
#: Where the modules of an architecture are in its other files, if not behind its layers, and what
#: they call tensors.
NEXTN_MODULES = {
    "mimo2": (
        "model.mtp.layers.{}.",
        {"ffn_norm": "pre_mlp_layernorm", "nextn.shared_head_norm": "final_layernorm"},
    ),
    "step35": (
        "",
        {
            "nextn.shared_head_norm": "transformer.shared_head.norm",
            "nextn.shared_head_head": "transformer.shared_head.output",
        },
    ),
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
#: Mamba-2, alone and in hybrids.
_MAMBA_2 = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
#: The gated delta rule. Old files of Qwen3-Next have `ssm_in` in place of two matrices.
_GATED_DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
#: The gates before sublayers of Qwen3.8, and its embeddings of n-grams.
_STREAM_GATES = {
    f"hc_{part}_{kind}": f"{own}_hyper_connection.{name}"
    for part, own in (("attn", "attn"), ("ffn", "mlp"))
    for kind, name in (
        ("norm", "hc_norm"),
        ("down", "input_mix_weight_down"),
        ("up", "input_mix_weight_up"),
        ("inject", "block_inject_weight"),
    )
}
_NGRAMS = {
    "ple_key": "ple.key_proj",
    "ple_value": "ple.value_proj",
    **{f"ple_norm_{part}": f"ple.norm_{part}" for part in ("key", "query", "conv")},
    "ple_conv1d": "ple.conv1d",
}
_SHORT_CONV = {
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}


_SUM_NORMS = {
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_feedforward_layernorm",
}


def _shared(module: str) -> dict[str, str]:
    """The router, and the matrices of an MLP that every token runs through."""
    parts = {f"ffn_{part}_shexp": f"mlp.{module}.{part}_proj" for part in ("gate", "up", "down")}
    return {"ffn_gate_inp": "mlp.gate", **parts}


_GEMMA_4 = ("gemma4", "diffusion-gemma")
#: Scales of the layers of DiffusionGemma as a context.
CONTEXT_SCALE = "enc_layer_output_scale.weight"
#: Latent attention and experts.
_DEEPSEEK = ("deepseek2", "deepseek32", "glm-dsa", "mistral4")
#: Latent attention.
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_INDEXER = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
#: MiniMax-M3's.
_BLOCK_INDEXER = {
    f"indexer.{part}": f"self_attn.indexer.{part}"
    for part in ("q_proj", "k_proj", "q_norm", "k_norm")
}
#: What makes the entries of DeepSeek-V4.
_ENTRIES = {"kv": "kv_proj", "gate": "gate_proj", "norm": "kv_norm"}
_KIMI_DELTA = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}
_LOW_RANK_DELTA = {
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    **_KIMI_DELTA,
}
#: Hyper-connections, whose Hugging Face names have no suffix.
_HYPER = {
    f"hc_{part}_{kind}.weight": f"{part}_hc.{kind}"
    for part in ("attn", "ffn")
    for kind in ("fn", "base", "scale")
}
_QWEN_EXPERTS = {**_shared("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
#: RWKV-6.
_DYNAMIC_MIX = {
    f"time_mix_{part}": f"attention.{part}"
    for part in ("receptance", "key", "value", "gate", "output")
}
#: RWKV-7.
_TIME_MIX = {
    "time_mix_receptance": "attn.r_proj",
    "time_mix_key": "attn.k_proj",
    "time_mix_value": "attn.v_proj",
    "time_mix_output": "attn.o_proj",
    "time_mix_ln": "attn.g_norm",
    **{f"time_mix_{x}1": f"attn.{x}_lora.lora.0" for x in "wavg"},
    **{f"time_mix_{x}2": f"attn.{x}_lora.lora.2" for x in "wavg"},
}
OVERRIDES = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma-embedding": _SANDWICH,
    "gemma3n": {**_SANDWICH, **_PER_LAYER, **_STREAMS},
    **dict.fromkeys(
        _GEMMA_4,
        {
            **_SANDWICH,
            **_PER_LAYER,
            "ffn_gate_inp": "router.proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
    ),
    "bert": _SUM_NORMS,
    "nomic-bert": {**_SUM_NORMS, "attn_qkv": "self_attn.qkv_proj"},
    "nomic-bert-moe": {
        **_SUM_NORMS,
        "attn_qkv": "self_attn.qkv_proj",
        "ffn_gate_inp": "mlp.router.layer",
    },
    "jina-bert-v2": _SUM_NORMS,
    "jina-bert-v3": {**_SUM_NORMS, "attn_qkv": "self_attn.qkv_proj"},
    "modern-bert": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "olmo2": _POST_NORMS,
    "exaone4": _POST_NORMS,
    "glm4": {**_SANDWICH, "ffn_up": "mlp.gate_up_proj"},
    "chatglm": {"ffn_up": "mlp.gate_up_proj"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "gpt2": {"attn_qkv": "self_attn.qkv_proj"},
    "gptneox": {"attn_qkv": "self_attn.qkv_proj"},
    "falcon": {  # if there is one norm, it is that of both sublayers
        "attn_qkv": "self_attn.qkv_proj",
        "attn_norm": "post_attention_layernorm",
        "attn_norm_2": "input_layernorm",
    },
    "bloom": {"attn_qkv": "self_attn.qkv_proj"},
    "codeshell": {"attn_qkv": "self_attn.qkv_proj"},
    "starcoder": {"attn_qkv": "self_attn.qkv_proj"},
    "jais": {"attn_qkv": "self_attn.qkv_proj"},
    "spark2_5": {"attn_qkv": "self_attn.qkv_proj", "attn_gate": "self_attn.gate_proj"},
    "qwen": {"attn_qkv": "self_attn.qkv_proj"},
    "openelm": {"attn_qkv": "self_attn.qkv_proj"},
    "dbrx": {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.gate",
    },
    "mpt": {"attn_qkv": "self_attn.qkv_proj"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    **dict.fromkeys(
        ("plamo2", "plamo3"),
        {
            **_SANDWICH,
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_up": "mlp.gate_up_proj",
            **{f"ssm_{part}": f"mamba.{part}_proj" for part in ("in", "x", "dt", "out")},
            "ssm_conv1d": "mamba.conv1d",
        },
    ),
    **dict.fromkeys(
        ("qwen3moe", "qwen3vlmoe", "llada-moe", "rnd1", "grovemoe"), {"ffn_gate_inp": "mlp.gate"}
    ),
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "arctic": {
        "ffn_norm": "residual_layernorm",
        "ffn_norm_exps": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.gate",
        **{f"ffn_{part}": f"mlp.residual_mlp.{part}_proj" for part in ("gate", "up", "down")},
    },
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    "olmoe": {"ffn_gate_inp": "mlp.gate"},
    "granitemoe": _shared("shared_mlp"),
    "granite_swa": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_up_shexp": "mlp.shared_mlp.gate_up_proj",
        "ffn_down_shexp": "mlp.shared_mlp.down_proj",
    },
    "granitehybrid": {**_MAMBA_2, **_shared("shared_mlp")},
    "falcon-h1": _MAMBA_2,
    "nemotron_h": _MAMBA_2,
    "nemotron_h_moe": {
        **_MAMBA_2,
        **_shared("shared_experts"),
        "ffn_latent_down": "mlp.fc1_latent_proj",
        "ffn_latent_up": "mlp.fc2_latent_proj",
    },
    "mamba2": _MAMBA_2,
    "qwen3next": {**_GATED_DELTA, **_QWEN_EXPERTS},
    "qwen35": _GATED_DELTA,
    "qwen35moe": {**_GATED_DELTA, **_QWEN_EXPERTS},
    "qwen4exp": {
        **_GATED_DELTA,
        **_QWEN_EXPERTS,
        **_BLOCK_INDEXER,
        **_STREAM_GATES,
        **_NGRAMS,
    },
    "lfm2": _SHORT_CONV,
    "lfm2moe": {**_SHORT_CONV, "ffn_gate_inp": "mlp.gate"},
    "rwkv6": {
        **_DYNAMIC_MIX,
        "attn_norm_2": "post_attention_layernorm",
        "time_mix_ln": "attention.ln_x",
        "channel_mix_key": "mlp.up_proj",
        "channel_mix_value": "mlp.down_proj",
        "channel_mix_receptance": "mlp.receptance",
    },
    "rwkv6qwen2": _DYNAMIC_MIX,
    "rwkv7": {
        **_TIME_MIX,
        "attn_norm_2": "post_attention_layernorm",
        "channel_mix_key": "mlp.up_proj",
        "channel_mix_value": "mlp.down_proj",
    },
    "arwkv7": _TIME_MIX,
    "mamba": {
        "ssm_in": "mixer.in_proj",
        "ssm_conv1d": "mixer.conv1d",
        "ssm_x": "mixer.x_proj",
        "ssm_dt": "mixer.dt_proj",
        "ssm_out": "mixer.out_proj",
    },
    "jamba": {
        **{f"ssm_{part}": f"mamba.{part}_proj" for part in ("in", "x", "dt", "out")},
        **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
        "ssm_conv1d": "mamba.conv1d",
        "ffn_gate_inp": "feed_forward.router",
    },
    "qwen2moe": _QWEN_EXPERTS,
    "ernie4_5-moe": _shared("shared_experts"),
    "glm4moe": {
        "post_attention_norm": "post_attention_layernorm",
        **_shared("shared_experts"),
    },
    **dict.fromkeys(
        ("dots1", "bailingmoe", "deepseek", "deepseek2-ocr", "exaone-moe", "cohere2moe"),
        _shared("shared_experts"),
    ),
    "minimax-m3": {**_shared("shared_experts"), **_BLOCK_INDEXER},
    "laguna": {"attn_gate": "self_attn.gate_proj", **_shared("shared_experts")},
    "step35": {"attn_gate": "self_attn.gate_proj", **_shared("share_expert")},
    **dict.fromkeys(
        ("bitnet", "bitnet-b1.58"),
        {"attn_sub_norm": "self_attn.inner_norm", "ffn_sub_norm": "mlp.inner_norm"},
    ),
    "phimoe": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "bailingmoe2": {**_shared("shared_experts"), "attn_qkv": "self_attn.qkv_proj"},
    "afmoe": {**_SANDWICH, "attn_gate": "self_attn.gate_proj", **_shared("shared_experts")},
    "muse-glimmer": {**_SANDWICH, "attn_gate": "self_attn.gate_proj"},
    "hrm_text": {"attn_gate": "self_attn.gate_proj"},
    "minimax-01": {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_gate": "self_attn.output_gate",
        "attn_norm_2": "self_attn.norm",
        "ffn_gate_inp": "mlp.gate",
    },
    "minimax-m2": {"ffn_gate_inp": "mlp.gate"},
    "hunyuan-moe": _shared("shared_mlp"),
    "llama4": {**_shared("shared_expert"), "ffn_gate_inp": "feed_forward.router"},
    **dict.fromkeys(_DEEPSEEK, {**_LATENT, **_shared("shared_experts")}),
    **dict.fromkeys(
        ("deepseek32", "glm-dsa"), {**_LATENT, **_shared("shared_experts"), **_INDEXER}
    ),
    "hy_v4": {
        **_LATENT,
        **_shared("shared_experts"),
        **_INDEXER,
        "attn_gate": "self_attn.gate_proj",
    },
    "deepseek4": {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_norm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv": "self_attn.kv_proj",
        **dict.fromkeys(("attn_kv_norm", "attn_kv_a_norm"), "self_attn.kv_norm"),
        "attn_output_a": "self_attn.o_a_proj",
        "attn_output_b": "self_attn.o_b_proj",
        **{f"attn_compressor_{x}": f"self_attn.compressor.{y}" for x, y in _ENTRIES.items()},
        **{
            f"indexer_compressor_{x}": f"self_attn.compressor.indexer.{y}"
            for x, y in _ENTRIES.items()
        },
        "indexer.attn_q_b": "self_attn.compressor.indexer.q_b_proj",
        "indexer.proj": "self_attn.compressor.indexer.scorer.weights_proj",
        **_shared("shared_experts"),
    },
    "minicpm3": _LATENT,
    "plm": _LATENT,
    "grok": {
        "attn_output_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        **dict.fromkeys(("layer_output_norm", "post_ffw_norm"), "post_feedforward_layernorm"),
        "ffn_gate_inp": "block_sparse_moe.gate",
    },
    "hy_v3": _shared("shared_experts"),
    **dict.fromkeys(("mellum", "smallthinker", "maple"), {"ffn_gate_inp": "mlp.gate"}),
    "mimo2": {"ffn_gate_inp": "mlp.gate", "attn_qkv": "self_attn.qkv_proj"},
    "kimi-linear": {
        **_LATENT,
        **_shared("shared_experts"),
        **_LOW_RANK_DELTA,
    },
    "kimi-k3": {
        **_LATENT,
        **_shared("shared_experts"),
        **_KIMI_DELTA,
        **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g")},
        "attn_gate": "self_attn.g_proj",
        "attn_res_score": "self_attention_res_score",
        "ffn_res_score": "mlp_res_score",
        "ffn_routed_down": "mlp.fc1_latent_proj",
        "ffn_routed_up": "mlp.fc2_latent_proj",
        "ffn_routed_norm": "mlp.routed_expert_norm",
    },
    "glm5-next": {
        **_LATENT,
        **_shared("shared_experts"),
        **_INDEXER,
        **_LOW_RANK_DELTA,
    },
    "bailingmoe3": {
        **_LATENT,
        **_shared("shared_experts"),
        **_KIMI_DELTA,
        "attn_gate": "self_attn.g_proj",
        "ssm_f_a": "self_attn.f_proj",
        "ssm_g_a": "self_attn.g_proj",
    },
}
_MLP_EXPERTS = {
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
}
EXPERTS = {
    **dict.fromkeys(
        ("nemotron_h_moe", "nomic-bert-moe"),
        {part: _MLP_EXPERTS[part] for part in ("ffn_up", "ffn_down")},
    ),
    **dict.fromkeys(
        ("llama", "phimoe", "grok"),
        {
            "ffn_gate": "block_sparse_moe.experts.{}.w1",
            "ffn_up": "block_sparse_moe.experts.{}.w3",
            "ffn_down": "block_sparse_moe.experts.{}.w2",
        },
    ),
    **dict.fromkeys(
        _GEMMA_4, {part: name.removeprefix("mlp.") for part, name in _MLP_EXPERTS.items()}
    ),
    **dict.fromkeys(
        ("llama4", "jamba"),
        {part: name.replace("mlp", "feed_forward") for part, name in _MLP_EXPERTS.items()},
    ),
    **dict.fromkeys(
        (
            *("qwen2moe", "qwen3moe", "qwen3next", "qwen35moe", "qwen4exp", "olmoe", "glm4moe"),
            "gpt-oss",
            *("granitemoe", "granite_swa", "granitehybrid", "lfm2moe", "ernie4_5-moe"),
            *("dbrx", "deepseek", "deepseek2-ocr", "deepseek4", *_DEEPSEEK),
            *("llada-moe", "rnd1", "dots1", "minimax-m2", "hunyuan-moe", "qwen3vlmoe"),
            "minimax-01",
            *("bailingmoe", "bailingmoe2", "afmoe", "exaone-moe"),
            *(
                "hy_v3",
                "hy_v4",
                "mellum",
                "mimo2",
                "kimi-linear",
                "kimi-k3",
                "bailingmoe3",
                "glm5-next",
            ),
            *("laguna", "step35", "cohere2moe", "minimax-m3", "smallthinker", "maple", "arctic"),
        ),
        _MLP_EXPERTS,
    ),
    "grovemoe": {
        **_MLP_EXPERTS,
        **{f"ffn_{x}_ch": f"mlp.chunk_experts.{{}}.{x}_proj" for x in ("gate", "up", "down")},
    },
}
#: The experts of groups, in `EXPERTS`, have this at their ends.
OF_GROUPS = "_ch"
#: Stacks of matrices, one for each head, of latent attention.
HEADS = dict.fromkeys(
    (*_DEEPSEEK, "hy_v4", "kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next"),
    {"attn_k_b": "self_attn.k_b_proj.{}", "attn_v_b": "self_attn.v_b_proj.{}"},
)
#: Vectors whose Hugging Face names have no suffix.
VECTORS = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_MAMBA_2_VECTORS = {"ssm_a": "mamba.A", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
_GATED_DELTA_VECTORS = {"ssm_a": "linear_attn.A", "ssm_dt.bias": "linear_attn.dt_bias"}
_KIMI_VECTORS = {"ssm_a": "self_attn.A", "ssm_dt.bias": "self_attn.dt_bias"}
_DYNAMIC_MIX_VECTORS = {
    "time_mix_decay.weight": "attention.time_decay",
    **{f"time_mix_decay_w{i}.weight": f"attention.time_decay_w{i}" for i in (1, 2)},
    **{f"time_mix_w{i}.weight": f"attention.time_maa_w{i}" for i in (1, 2)},
    **{f"time_mix_lerp_{x}.weight": f"attention.time_maa_{x}" for x in "xwkvrg"},
    "time_mix_lerp_fused.weight": "attention.time_maa",
}
_TIME_MIX_VECTORS = {
    "time_mix_lerp_fused.weight": "attn.x_x",
    "time_mix_k_k.weight": "attn.k_k",
    "time_mix_k_a.weight": "attn.k_a",
    "time_mix_r_k.weight": "attn.r_k",
    **{f"time_mix_{x}0.weight": f"attn.{x}_lora.lora.2.bias" for x in "wav"},
}
#: Vectors of one architecture that have the names of factors of a weight elsewhere, or no suffix.
OWN_VECTORS = {
    "gemma3n": {"altup_correct_scale.weight": "altup.correct_output_scale"},
    **dict.fromkeys(
        _GEMMA_4,
        {
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "layer_output_scale.weight": "layer_scalar",
        },
    ),
    "mamba": {"ssm_a": "mixer.A", "ssm_d": "mixer.D"},
    "jamba": {"ssm_a": "mamba.A", "ssm_d": "mamba.D"},
    **dict.fromkeys(
        ("plamo2", "plamo3"),
        {
            "ssm_a": "mamba.A",
            "ssm_d": "mamba.D",
            **{f"ssm_{part}_norm": f"mamba.{part}_layernorm.weight" for part in ("dt", "b", "c")},
            **{name: f"{module}.weight" for name, module in _POST_NORMS.items()},
        },
    ),
    "rwkv6": {
        **_DYNAMIC_MIX_VECTORS,
        "time_mix_first.weight": "attention.time_faaaa",
        **{f"channel_mix_lerp_{x}.weight": f"feed_forward.time_maa_{x}" for x in "kr"},
    },
    "rwkv6qwen2": _DYNAMIC_MIX_VECTORS,
    "rwkv7": {**_TIME_MIX_VECTORS, "channel_mix_lerp_k.weight": "ffn.x_k"},
    "arwkv7": _TIME_MIX_VECTORS,
    **dict.fromkeys(("granitehybrid", "nemotron_h", "nemotron_h_moe", "mamba2"), _MAMBA_2_VECTORS),
    "falcon-h1": {**_MAMBA_2_VECTORS, "ffn_norm": "pre_ff_layernorm.weight"},
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe", "qwen4exp"), _GATED_DELTA_VECTORS),
    **dict.fromkeys(("kimi-linear", "kimi-k3", "bailingmoe3"), _KIMI_VECTORS),
    "deepseek4": {
        "attn_compressor_ape.weight": "self_attn.compressor.position_bias",
        "indexer_compressor_ape.weight": "self_attn.compressor.indexer.position_bias",
        "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
        **_HYPER,
    },
    "glm5-next": {
        **_KIMI_VECTORS,
        **_HYPER,
        **{
            f"indexer_compressor_{part}.weight": f"self_attn.indexer.index_kpool_compress_{part}"
            for part in ("gate", "ape")
        },
    },
    "hy_v3": {"exp_probs_b": "mlp.gate.e_score_correction_bias"},
    "hy_v4": _HYPER,
    "hrm_text": {"z_l_init": "z_L_init"},
}
#: Vectors that are stored as matrices, those of Mamba-2 with one row per group or head.
FLAT = (
    *("mamba.A", "mamba.D", "mamba.norm.weight", "self_attn.A"),
    "mlp.gate.e_score_correction_bias",  # of ERNIE
)
#: RWKV-7: the first layer does not mix its values; files have another product's in that place.
UNUSED_IN_FIRST = dict.fromkeys(("rwkv7", "arwkv7"), ("time_mix_v0", "time_mix_v1", "time_mix_v2"))
#: Architectures whose layers that predict further tokens are left out.
WITHOUT_NEXTN = ("nemotron_h_moe", "exaone-moe", "cohere2moe", "deepseek4", "hy_v4")
#: Factors of a weight and of its inputs, which are read with it, and of activations, which are not
#: used.
SCALES = ("scale", "columns", "input_scale")
#: Parts of layers that are read into the config.
FACTORS = {"muse-glimmer": ("attn_q_norm", "attn_k_norm")}
#: Rope factors, which are read into the config.
IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: Architectures whose query and key rows are stored for interleaved rotary pairs.
INTERLEAVED = (
    *("llama", "smollm3", "granite", "granitemoe", "granitehybrid", "minicpm", "mistral3"),
    *("llada", "olmo", "arcee", "internlm2", "bailingmoe", "llama-embed", "deci"),
    *("granite_swa", "baichuan", "xverse", "deepseek", "muse-glimmer", "nanbeige", "arctic"),
)
#: Architectures whose norms are stored with 1 added, but for those of recurrences.
ONE_ADDED = (
    *("gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron"),
    *("qwen3next", "qwen35", "qwen35moe", "qwen4exp", "step35", "minimax-m3", "muse-glimmer"),
)


def layer_names(architecture: str) -> dict[str, str]:
    """The usual names of the modules of a layer by their names in files of `architecture`."""
    return {**LAYER, **OVERRIDES.get(architecture, {})}


def own_targets(architecture: str) -> dict[str, str]:
    """The names in files of `architecture` of the modules of a layer, by their usual names: the
    architecture's own, if there are several."""
    names = (LAYER, OVERRIDES.get(architecture, {}))
    return {usual: target for found in names for target, usual in found.items()}


def outer_names(architecture: str) -> dict[str, str]:
    """The same of the modules outside the layers."""
    return {**OUTER, **OWN_OUTER.get(architecture, {})}


def has_one_added(architecture: str, name: str, has_final_offset: bool) -> bool:
    """Whether files of `architecture` store a tensor with 1 added.

    Args:
        architecture: The architecture.
        name: The tensor's name in files.
        has_final_offset: `Family.has_final_offset`.
    """
    module, part = name.rpartition(".")[0], name.split(".", 2)[-1]
    is_norm = name.endswith("norm.weight") or part.startswith("ple_norm_")
    is_norm = is_norm and not module.endswith("ssm_norm")
    has_offset = name.startswith("blk.") or has_final_offset
    return architecture in ONE_ADDED and is_norm and has_offset


def is_own_vector(architecture: str, name: str) -> bool:
    """Whether a tensor is a vector of the layers of `architecture` that has the name of a factor of
    a weight in other files, or no suffix in Hugging Face's layout."""
    return name.split(".", 2)[-1] in OWN_VECTORS.get(architecture, {})
