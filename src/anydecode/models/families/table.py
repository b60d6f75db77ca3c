"""The supported model families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydecode.models.families.blockffn import BLOCKFFN
from anydecode.models.families.family import Family, MixtureOfExperts
from anydecode.models.families.patterns import (
    all_full,
    all_hybrid,
    all_recurrent,
    all_sliding,
    all_sliding_if_enabled,
    alternating_before_layer,
    attention_every_nth,
    chunked_if_rope,
    cohere_scales,
    deepseek_v2_routing,
    dense_layers,
    ernie_layers,
    falcon_h1_scales,
    full_every_nth,
    gemma3n_layers,
    gemma4_layers,
    granite_scales,
    granite_sizes,
    hybrid_pattern,
    lfm2_sizes,
    listed_attention,
    llama4_layers,
    minicpm_scales,
    mpt_scales,
    nemotron_h_layers,
    no_rope,
    recurrent_gemma_layers,
    recurrent_gemma_scales,
    recurrent_gemma_sizes,
    rope_flags,
    rope_if_named,
    rope_if_sliding,
    rope_unless_alibi,
    sliding_from_layer,
    sliding_without_rope,
    two_sided_window,
)
from anydecode.models.families.recurrent import (
    FALCON_H1,
    FALCON_MAMBA,
    GATED_DELTA,
    GATED_LRU,
    MAMBA,
    MAMBA_2,
    SHORT_CONV,
)
from anydecode.models.families.rwkv import TIME_MIX, rwkv7_layers, rwkv7_sizes
from anydecode.models.families.sambay import PHI4FLASH

_GEMMA = {
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}

_MAMBA: dict[str, Any] = {
    "mlp": "none",
    "keys": {
        "state_size": ("mamba_d_state",),
        "conv_kernel": ("mamba_d_conv",),
        "expand": ("mamba_expand",),
        "use_bias": ("mamba_proj_bias",),
        "use_conv_bias": ("mamba_conv_bias",),
        "layer_norm_epsilon": ("rms_norm_eps",),
    },
    "names": {"embed_tokens": "embeddings", "norm": "norm_f", "input_layernorm": "norm"},
    "defaults": {
        "max_position_embeddings": 1 << 20,
        "num_attention_heads": 1,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
}

_LFM2: dict[str, Any] = {
    "qk_norm": "head",
    "recurrent": SHORT_CONV,
    "names": {
        "norm": "embedding_norm",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
    },
}
_LFM2_KEYS = {"norm_eps": ("rms_norm_eps",), "tie_embedding": ("tie_word_embeddings",)}
_LFM2_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
}
#: Qwen3-Next and Qwen3.5.
_GATED_DELTA: dict[str, Any] = {
    "qk_norm": "head",
    "norm_offset": 1.0,
    "has_partial_rotary": True,
    "attention_gate": "sigmoid",
    "recurrent": GATED_DELTA,
    "defaults": {"head_dim": 256, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6},
}
_QWEN_EXPERTS = MixtureOfExperts(
    shared_module="shared_expert",
    shared_size="shared_expert_intermediate_size",
    has_shared_gate=True,
)
_GPT: dict[str, Any] = {"norm": "layer", "has_norm_bias": True, "mlp": "plain"}

_ERNIE_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": True,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
}
_COHERE: dict[str, Any] = {
    "norm": "layer",
    "is_parallel": True,
    "shares_norm": True,
    "interleaved_rope": True,
    "scales": cohere_scales,
    "defaults": {"tie_word_embeddings": True, "rope_theta": 500_000.0},
}

#: Latent attention. The biases of `attention_bias` are read where they belong.
_DEEPSEEK: dict[str, Any] = {"interleaved_rope": True, "has_latent_attention": True}

#: The entry points by which other packages add families; their names are model types.
GROUP = "anydecode.families"

#: The families by `model_type` of their configs.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        # The last name is that of early conversions.
        (
            *("LlamaForCausalLM", "IQuestCoderForCausalLM", "LlavaLlamaForCausalLM"),
            "LLaMAForCausalLM",
        ),
        all_full,
        model_types=("iquestcoder", "llava_llama"),
    ),
    "mistral": Family(("MistralForCausalLM",), all_sliding, defaults={"sliding_window": 4096}),
    "mixtral": Family(
        ("MixtralForCausalLM",),
        all_sliding,
        defaults={"rope_theta": 1e6},
        moe=MixtureOfExperts("intermediate_size"),
    ),
    "smollm3": Family(
        ("SmolLM3ForCausalLM",),
        sliding_without_rope,
        rope_layers=rope_flags,
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
    ),
    "qwen2": Family(
        (
            "Qwen2ForCausalLM",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            *("DotsOCRForCausalLM", "LlavaQwenForCausalLM"),
        ),
        sliding_from_layer,
        model_types=(
            *("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
            *("qwen2_5_omni_text", "dots_ocr", "llava_qwen"),
        ),
        qkv_bias=True,
        defaults={"sliding_window": 4096},
    ),
    "mimo": Family(
        ("MiMoForCausalLM",), sliding_from_layer, qkv_bias=True, defaults={"sliding_window": 4096}
    ),
    "qwen3": Family(
        (
            *("Qwen3ForCausalLM", "KeyeForConditionalGeneration"),
            "KeyeVL1_5ForConditionalGeneration",
        ),
        sliding_from_layer,
        model_types=("qwen3_vl_text", "Keye", "KeyeVL1_5"),
        qk_norm="head",
        defaults={"sliding_window": 4096, "head_dim": 128},
    ),
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM",),
        all_sliding_if_enabled,
        qk_norm="head",
        defaults={"sliding_window": 4096},
        moe=MixtureOfExperts(is_normalised=False),
    ),
    "gpt_oss": Family(
        ("GptOssForCausalLM",),
        full_every_nth,
        defaults={
            "sliding_window_pattern": 2,
            "sliding_window": 128,
            "head_dim": 64,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
        },
        moe=MixtureOfExperts("intermediate_size", has_biases=True, is_interleaved=True),
        has_sinks=True,
        has_clamped_swiglu=True,
    ),
    "qwen2_moe": Family(
        ("Qwen2MoeForCausalLM",),
        alternating_before_layer,
        qkv_bias=True,
        defaults={"sliding_window": 4096},
        moe=MixtureOfExperts(
            is_normalised=False,
            shared_module="shared_expert",
            shared_size="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
    ),
    "olmoe": Family(
        ("OlmoeForCausalLM",),
        all_full,
        qk_norm="full",
        defaults={"rms_norm_eps": 1e-5},
        moe=MixtureOfExperts("intermediate_size", is_normalised=False),
    ),
    "glm4_moe": Family(
        ("Glm4MoeForCausalLM",),
        all_full,
        model_types=("glm4v_moe_text",),
        qk_norm="head",
        defaults={
            "use_qk_norm": False,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
        },
        moe=MixtureOfExperts(
            scoring="sigmoid", has_selection_bias=True, shared_module="shared_experts"
        ),
        output_bias=False,
        has_partial_rotary=True,
    ),
    "deepseek_v2": Family(
        ("DeepseekV2ForCausalLM",),
        all_full,
        derived=deepseek_v2_routing,
        moe=MixtureOfExperts(
            is_normalised=False,
            shared_module="shared_experts",
            methods=("greedy", "group_limited_greedy"),
        ),
        **_DEEPSEEK,
    ),
    "deepseek_v3": Family(
        ("DeepseekV3ForCausalLM",),
        all_full,
        moe=MixtureOfExperts(
            scoring="sigmoid", has_selection_bias=True, shared_module="shared_experts"
        ),
        **_DEEPSEEK,
    ),
    "glm4_moe_lite": Family(
        ("Glm4MoeLiteForCausalLM",),
        all_full,
        defaults={"rms_norm_eps": 1e-5},
        derived=dense_layers,
        moe=MixtureOfExperts(
            scoring="sigmoid", has_selection_bias=True, shared_module="shared_experts"
        ),
        **_DEEPSEEK,
    ),
    # Phi-4-multimodal is Phi-3 whose matrices have updates for images and speech, without which it
    # reads texts.
    "phi3": Family(
        (
            *("Phi3ForCausalLM", "Phi3VForCausalLM"),
            *("Phi4MMForCausalLM", "Phi4MultimodalForCausalLM"),
        ),
        all_sliding,
        model_types=("phi3_v", "phi4mm", "phi4_multimodal"),
        has_partial_rotary=True,
        other_names={
            module: f"{module}.base_layer"
            for module in (
                *("self_attn.qkv_proj", "self_attn.o_proj"),
                *("mlp.gate_up_proj", "mlp.down_proj"),
            )
        },
    ),
    "phimoe": Family(
        ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        all_sliding,
        norm="layer",
        has_norm_bias=True,
        keys={"rms_norm_eps": ("layer_norm_eps",)},
        defaults={"rope_theta": 1e6},
        moe=MixtureOfExperts("intermediate_size", scoring="sparsemixer"),
    ),
    "olmo2": Family(
        ("Olmo2ForCausalLM",),
        all_full,
        norms="post",
        qk_norm="full",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "gemma2": Family(
        ("Gemma2ForCausalLM",),
        full_every_nth,
        norms="both",
        norm_offset=1.0,
        has_scaled_embedding=True,
        has_attention_softcap=True,
        defaults={
            **_GEMMA,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    # Its config has a softcap for attention scores, which transformers does not apply.
    "gemma3_text": Family(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        full_every_nth,
        norms="both",
        qk_norm="head",
        norm_offset=1.0,
        has_scaled_embedding=True,
        defaults={**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    ),
}

FAMILIES |= {
    "gemma3n_text": Family(
        ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        full_every_nth,
        norms="both",
        qk_norm="head",
        has_value_norm=True,
        has_streams=True,
        has_scaled_embedding=True,
        derived=gemma3n_layers,
        defaults={
            **_GEMMA,
            "query_pre_attn_scalar": 1,
            "sliding_window": 512,
            "sliding_window_pattern": 5,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
            "num_kv_shared_layers": 15,
            "laurel_rank": 64,
            "altup_correct_scale": True,
            "final_logit_softcapping": 30.0,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
    ),
    "gemma4_text": Family(
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        full_every_nth,
        norms="both",
        qk_norm="head",
        has_value_norm=True,
        has_layer_scale=True,
        has_scaled_embedding=True,
        derived=gemma4_layers,
        moe=MixtureOfExperts(has_norms=True),
        defaults={
            **_GEMMA,
            "query_pre_attn_scalar": 1,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "hidden_size_per_layer_input": 256,
        },
    ),
}

FAMILIES |= {
    "llama4_text": Family(
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        chunked_if_rope,
        qk_norm="plain",
        norm_after_rope=True,
        interleaved_rope=True,
        rope_layers=rope_flags,
        derived=llama4_layers,
        moe=MixtureOfExperts(
            is_normalised=False,
            is_transposed=True,
            scoring="sigmoid",
            scales_inputs=True,
            by_logits=True,
            shared_module="shared_expert",
            shared_size="moe_intermediate_size",
        ),
        names={
            f"mlp.{module}{part}_proj": f"feed_forward.{module}{part}_proj"
            for module in ("", "shared_expert.")
            for part in ("gate", "up", "down")
        },
        defaults={
            "head_dim": 128,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "attention_chunk_size": 8192,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
        },
    ),
    "granite": Family(
        ("GraniteForCausalLM",),
        all_full,
        model_types=("granite4_vision_text", "granite_docling_text"),
        scales=granite_scales,
    ),
    **{
        model_type: Family(
            (f"{name}ForCausalLM",),
            all_full,
            scales=granite_scales,
            defaults={"shared_intermediate_size": 0},
            moe=MixtureOfExperts(
                "intermediate_size",
                shared_module="shared_mlp",
                shared_size="shared_intermediate_size",
            ),
        )
        for model_type, name in (
            ("granitemoe", "GraniteMoe"),
            ("granitemoeshared", "GraniteMoeShared"),
        )
    },
    "granitemoehybrid": Family(
        ("GraniteMoeHybridForCausalLM",),
        all_recurrent,
        recurrent=MAMBA_2,
        scales=granite_scales,
        rope_layers=rope_if_named,
        derived=granite_sizes,
        moe=MixtureOfExperts(shared_module="shared_mlp", shared_size="shared_intermediate_size"),
        names={
            "mlp.gate_up_proj": "shared_mlp.input_linear",
            "mlp.down_proj": "shared_mlp.output_linear",
        },
    ),
    "blockffn": BLOCKFFN,
    "minicpm": Family(
        ("MiniCPMForCausalLM",),
        all_full,
        scales=minicpm_scales,
        defaults={"tie_word_embeddings": True},
    ),
    "glm4": Family(
        ("Glm4ForCausalLM",),
        all_full,
        model_types=("glm4v_text",),
        norms="both",
        has_partial_rotary=True,
        interleaved_rope=True,
        output_bias=False,
        names={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        defaults={
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-07,
        },
    ),
    "ernie4_5": Family(
        ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
        all_full,
        interleaved_rope=True,
        keys={"use_bias": ("attention_bias", "mlp_bias")},
        defaults={"head_dim": 128, **_ERNIE_DEFAULTS},
    ),
    "ernie4_5_moe": Family(
        ("Ernie4_5_MoeForCausalLM",),
        all_full,
        interleaved_rope=True,
        derived=ernie_layers,
        keys={
            "use_bias": ("attention_bias", "mlp_bias"),
            "moe_num_experts": ("num_experts",),
            "moe_k": ("num_experts_per_tok",),
            "moe_num_shared_experts": ("n_shared_experts",),
            "moe_layer_start_index": ("first_k_dense_replace",),
            "moe_layer_interval": ("decoder_sparse_step",),
        },
        defaults={
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            **_ERNIE_DEFAULTS,
        },
        moe=MixtureOfExperts(has_selection_bias=True, shared_module="shared_experts"),
    ),
    "seed_oss": Family(
        ("SeedOssForCausalLM",),
        all_full,
        output_bias=False,
        defaults={"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True},
    ),
    "olmo3": Family(
        ("Olmo3ForCausalLM",),
        full_every_nth,
        norms="post",
        qk_norm="full",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "ministral": Family(("MinistralForCausalLM",), all_sliding, defaults={"sliding_window": 4096}),
    "ministral3": Family(
        ("Ministral3ForCausalLM",),
        all_sliding,
        has_query_growth=True,
        defaults={"head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ),
    "exaone4": Family(
        ("Exaone4ForCausalLM",),
        hybrid_pattern,
        norms="post",
        qk_norm="head",
        rope_layers=rope_if_sliding,
        defaults={"rms_norm_eps": 1e-5, "sliding_window_pattern": 4},
    ),
    "hunyuan_v1_dense": Family(
        ("HunYuanDenseV1ForCausalLM", "HunYuanVLForConditionalGeneration"),
        all_full,
        model_types=("hunyuan_vl", "hunyuan_vl_text"),
        qk_norm="head",
        norm_after_rope=True,
        names={
            "self_attn.q_norm": "self_attn.query_layernorm",
            "self_attn.k_norm": "self_attn.key_layernorm",
        },
        defaults={"rms_norm_eps": 1e-5},
    ),
    # The families below have layer norms.
    "starcoder2": Family(
        ("Starcoder2ForCausalLM",),
        all_sliding,
        norm="layer",
        has_norm_bias=True,
        mlp="plain",
        keys={
            "norm_epsilon": ("layer_norm_eps",),
            "use_bias": ("attention_bias", "mlp_bias"),
        },
        names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
        defaults={
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    "cohere": Family(
        ("CohereForCausalLM",),
        all_full,
        qk_norm="heads",
        **{**_COHERE, "defaults": {**_COHERE["defaults"], "use_qk_norm": False}},
    ),
    "cohere2": Family(
        ("Cohere2ForCausalLM",),
        full_every_nth,
        rope_layers=rope_if_sliding,
        **{
            **_COHERE,
            "defaults": {
                "tie_word_embeddings": True,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
            },
        },
    ),
    # Their layouts are converted when they are loaded.
    "gpt2": Family(
        ("GPT2LMHeadModel",),
        all_full,
        rope_layers=no_rope,
        has_position_table=True,
        defaults={"attention_bias": True, "mlp_bias": True},
        **_GPT,
    ),
    **{
        model_type: Family(
            (f"{name}ForCausalLM",),
            all_full,
            is_parallel=True,
            has_partial_rotary=True,
            interleaved_rope=True,
            defaults={"mlp_bias": True},
            **_GPT,
        )
        for model_type, name in (("gptj", "GPTJ"), ("codegen", "CodeGen"))
    },
    "gpt_neox": Family(
        ("GPTNeoXForCausalLM",),
        all_full,
        is_parallel=True,
        has_partial_rotary=True,
        defaults={"partial_rotary_factor": 0.25, "mlp_bias": True},
        **_GPT,
    ),
    "bloom": Family(
        ("BloomForCausalLM",),
        all_full,
        rope_layers=no_rope,
        has_alibi=True,
        has_embedding_norm=True,
        defaults={"attention_bias": True, "mlp_bias": True},
        **_GPT,
    ),
    "mpt": Family(
        ("MptForCausalLM", "MPTForCausalLM"),
        all_full,
        rope_layers=no_rope,
        has_alibi=True,
        has_qkv_limit=True,
        scales=mpt_scales,
        norm="layer",
        mlp="plain",
    ),
    "falcon": Family(
        ("FalconForCausalLM", "RWForCausalLM"),
        all_full,
        rope_layers=rope_unless_alibi,
        is_parallel=True,
        has_alibi=True,
        defaults={"alibi": False},
        **_GPT,
    ),
}


FAMILIES |= {
    "lfm2": Family(
        ("Lfm2ForCausalLM",),
        listed_attention,
        derived=lfm2_sizes,
        keys={**_LFM2_KEYS, "block_ff_dim": ("intermediate_size",)},
        defaults=_LFM2_DEFAULTS,
        **_LFM2,
    ),
    "lfm2_moe": Family(
        ("Lfm2MoeForCausalLM",),
        listed_attention,
        keys={**_LFM2_KEYS, "num_dense_layers": ("first_k_dense_replace",)},
        defaults={**_LFM2_DEFAULTS, "first_k_dense_replace": 2},
        moe=MixtureOfExperts(scoring="sigmoid", has_selection_bias=True),
        **_LFM2,
    ),
    "nemotron_h": Family(
        ("NemotronHForCausalLM",),
        all_recurrent,
        mlp="plain",
        has_single_sublayers=True,
        recurrent=MAMBA_2,
        rope_layers=no_rope,
        derived=nemotron_h_layers,
        moe=MixtureOfExperts(
            scoring="sigmoid",
            has_selection_bias=True,
            shared_module="shared_experts",
            shared_size="moe_shared_expert_intermediate_size",
        ),
        keys={
            "layers_block_type": ("layer_types",),
            "mamba_num_heads": ("mamba_n_heads",),
            "mamba_head_dim": ("mamba_d_head",),
            "ssm_state_size": ("mamba_d_state",),
            "n_groups": ("mamba_n_groups",),
            "conv_kernel": ("mamba_d_conv",),
            "use_bias": ("mamba_proj_bias",),
            "use_conv_bias": ("mamba_conv_bias",),
            "layer_norm_epsilon": ("rms_norm_eps",),
            "mlp_hidden_act": ("hidden_act",),
        },
        names={
            "embed_tokens": "embeddings",
            "norm": "norm_f",
            "input_layernorm": "norm",
            "post_attention_layernorm": "norm",
            **{
                f"{block}.{part}_proj": f"mixer.{part}_proj"
                for block, parts in (("self_attn", "qkvo"), ("mlp", ("up", "down")))
                for part in parts
            },
        },
        defaults={"head_dim": 128, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
    ),
    "falcon_h1": Family(
        ("FalconH1ForCausalLM",),
        all_hybrid,
        recurrent=FALCON_H1,
        scales=falcon_h1_scales,
        multipliers=True,
        keys={"projectors_bias": ("attention_out_bias",)},
        names={
            "norm": "final_layernorm",
            "post_attention_layernorm": "pre_ff_layernorm",
            "mlp.gate_proj": "feed_forward.gate_proj",
            "mlp.up_proj": "feed_forward.up_proj",
            "mlp.down_proj": "feed_forward.down_proj",
        },
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "mamba_rms_norm": False},
    ),
    "qwen3_next": Family(
        ("Qwen3NextForCausalLM",),
        attention_every_nth,
        moe=_QWEN_EXPERTS,
        **_GATED_DELTA,
    ),
    "qwen3_5_text": Family(
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        attention_every_nth,
        **_GATED_DELTA,
    ),
    "qwen3_5_moe_text": Family(
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        attention_every_nth,
        moe=_QWEN_EXPERTS,
        **_GATED_DELTA,
    ),
    "phi4flash": PHI4FLASH,
    "mamba": Family(("MambaForCausalLM",), all_recurrent, recurrent=MAMBA, **_MAMBA),
    "falcon_mamba": Family(
        ("FalconMambaForCausalLM",), all_recurrent, recurrent=FALCON_MAMBA, **_MAMBA
    ),
    "recurrent_gemma": Family(
        ("RecurrentGemmaForCausalLM",),
        recurrent_gemma_layers,
        derived=recurrent_gemma_sizes,
        norm_offset=1.0,
        has_partial_rotary=True,
        scales=recurrent_gemma_scales,
        recurrent=GATED_LRU,
        keys={
            "attention_window_size": ("sliding_window",),
            "logits_soft_cap": ("final_logit_softcapping",),
        },
        names={
            "norm": "final_norm",
            "input_layernorm": "temporal_pre_norm",
            "post_attention_layernorm": "channel_pre_norm",
            **{f"self_attn.{part}_proj": f"temporal_block.{part}_proj" for part in "qkvo"},
            **{f"mlp.{x}_proj": f"mlp_block.{x}_proj" for x in ("gate", "up", "down")},
        },
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.5,
            "sliding_window": 2048,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 1 << 20,
            "attention_out_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-6,
        },
    ),
    "rwkv7": Family(
        ("RWKV7ForCausalLM", "Rwkv7ForCausalLM"),
        rwkv7_layers,
        derived=rwkv7_sizes,
        norm="layer",
        has_norm_bias=True,
        has_embedding_norm=True,
        mlp="plain",
        recurrent=TIME_MIX,
        keys={"norm_eps": ("layer_norm_eps",)},
        names={
            "embed_tokens": "embeddings",
            "embed_norm": "layers.0.pre_norm",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp.mix": "ffn.x_k",
            "mlp.up_proj": "ffn.key",
            "mlp.down_proj": "ffn.value",
        },
        defaults={"hidden_act": "sqrelu", "num_attention_heads": 1},
    ),
    "mamba2": Family(
        ("Mamba2ForCausalLM",),
        all_recurrent,
        mlp="none",
        recurrent=MAMBA_2,
        keys={
            "num_heads": ("mamba_n_heads",),
            "head_dim": ("mamba_d_head",),
            "state_size": ("mamba_d_state",),
            "n_groups": ("mamba_n_groups",),
            "conv_kernel": ("mamba_d_conv",),
            "expand": ("mamba_expand",),
            "use_bias": ("mamba_proj_bias",),
            "use_conv_bias": ("mamba_conv_bias",),
            "layer_norm_epsilon": ("rms_norm_eps",),
        },
        names={"embed_tokens": "embeddings", "norm": "norm_f", "input_layernorm": "norm"},
        defaults={
            "max_position_embeddings": 1 << 20,
            "num_attention_heads": 1,
            "rms_norm_eps": 1e-5,
            "mamba_n_groups": 8,
        },
    ),
}


FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]


#: EmbeddingGemma (Vera et al., 2025, arXiv:2509.20354): Gemma 3 whose rows attend to both sides.
FAMILIES["embedding_gemma"] = replace(
    FAMILIES["gemma3_text"],
    architectures=("Gemma3TextModel", "Gemma3TextForCausalLM"),
    is_own=lambda config: config.get("use_bidirectional_attention") is True,
    causal=False,
    is_encoder=True,
    derived=two_sided_window,
)
