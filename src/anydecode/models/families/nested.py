"""The part of a multimodal config that describes the language model, and what it leaves out.

`transformers` writes into it only what differs from the defaults of its class (LLaVA-1.5 and
Gemma 3 4B have no numbers of heads), unlike into the config of a language model.
"""

from __future__ import annotations

from typing import Any

from anydecode.models.families.values import Config
from anydecode.models.limits import refusal

#: Other keys of the part of the language model than `text_config`: those of InternVL and of
#: DeepSeek-VL2.
_TEXT_KEYS = ("llm_config", "language_config")
#: The model types of the language models of MiniCPM-V and MiniCPM-o, which their configs are those
#: of, by `version`.
_MINICPM_VERSIONS = {"2.5": "llama", "2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"}

_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)


def _sizes(*sizes: int, **others: Any) -> dict[str, Any]:
    """The defaults of `_KEYS`, and of others."""
    return {**dict(zip(_KEYS, sizes, strict=True)), **others}


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_LLAMA = _sizes(32000, 4096, 11008, 32, 32, 32, 2048)
_QWEN = _sizes(151936, 4096, 22016, 32, 32, 32, 32768)
_HUNYUAN = _sizes(290943, 4096, 11008, 32, 32, 32, 2048)
_QWEN2_VL = _sizes(152064, 8192, 29568, 80, 64, 8, 32768, rms_norm_eps=1e-5, rope_theta=1e6)
#: The defaults of the classes, by model type.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _sizes(32000, 4096, 14336, 32, 32, 8, 131072),
    "ministral3": _sizes(131072, 4096, 14336, 34, 32, 8, 262144, rope_parameters=_YARN),
    "qwen2": _QWEN,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": _QWEN,
    "qwen3_vl_text": _sizes(151936, 4096, 22016, 32, 32, 32, 128000, rope_theta=5e5),
    "qwen3_vl_moe_text": _sizes(
        *(151936, 2048, 5632, 24, 16, 16, 128000),
        rope_theta=5e5,
        tie_word_embeddings=True,
        moe_intermediate_size=1408,
        num_experts_per_tok=4,
        n_routed_experts=60,
    ),
    "qwen3_5_text": _sizes(248320, 4096, 12288, 32, 16, 4, 32768),
    "qwen3_5_moe_text": _sizes(
        *(248320, 2048, 512, 40, 16, 2, 32768),
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts_per_tok=8,
        n_routed_experts=256,
    ),
    "qwen2_5_omni_text": _sizes(152064, 3584, 18944, 28, 28, 4, 32768, rope_theta=1e6),
    "qwen4_exp_text": _sizes(
        *(248320, 2048, 512, 40, 16, 2, 32768),
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts_per_tok=10,
        n_routed_experts=512,
    ),
    "gemma3_text": _sizes(262208, 2304, 9216, 26, 8, 4, 131072),
    "gemma3n_text": _sizes(262400, 2048, 16384, 35, 8, 2, 32768),
    "embedding_gemma2_text": _sizes(262144, 512, 2048, 24, 4, 2, 262144),
    "gemma4_text": _sizes(262144, 2304, 9216, 30, 8, 4, 131072, vocab_size_per_layer_input=262144),
    "gemma4_unified_text": _sizes(262144, 2304, 9216, 30, 8, 4, 262144),
    "llama4_text": _sizes(202048, 5120, 8192, 48, 40, 8, 131072, intermediate_size_mlp=16384),
    "mllama_text_model": _sizes(
        *(128256, 4096, 14336, 40, 32, 8, 131072), rms_norm_eps=1e-5, rope_theta=5e5
    ),
    "muse_glimmer_text": _sizes(202048, 6656, 19968, 52, 32, 2, 131072),
    "glm4v_text": _sizes(151552, 4096, 13696, 40, 32, 2, 32768, rms_norm_eps=1e-5),
    "aria_text": _sizes(32000, 4096, 4096, 32, 32, 32, 2048),
    "molmo2_text": _sizes(151936, 4096, 12288, 36, 32, 8, 36864),
    "glm_ocr_text": _sizes(59392, 1024, 4096, 16, 16, 8, 131072),
    "paddleocr_vl_text": _sizes(103424, 1024, 3072, 18, 16, 2, 131072),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_vl_text": _HUNYUAN,
    "granite": _LLAMA,
    "granite4_vision_text": _LLAMA,
    "granite_docling_text": _sizes(
        *(133800, 1024, 2048, 28, 16, 4, 32768),
        rms_norm_eps=1e-5,
        embedding_multiplier=12.0,
        logits_scaling=4.0,
        residual_multiplier=0.263,
        attention_multiplier=0.015625,
    ),
    "hyperclovax": _LLAMA,
    "deepseek_v3": _sizes(
        *(129280, 7168, 18432, 61, 128, 128, 4096),
        moe_intermediate_size=2048,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        v_head_dim=128,
        qk_nope_head_dim=128,
        n_group=8,
        topk_group=4,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        n_routed_experts=256,
    ),
    "mistral_large4_text": _sizes(
        *(204800, 6144, 24576, 72, 64, 64, 1048576),
        moe_intermediate_size=6144,
        kv_lora_rank=512,
        v_head_dim=128,
        num_experts_per_tok=4,
        n_routed_experts=128,
    ),
    "muse_spark_text": _sizes(
        *(202048, 8192, 16384, 62, 128, 16, 1048576),
        moe_intermediate_size=4096,
        num_experts_per_tok=8,
        num_local_experts=256,
    ),
    "glm5_next_text": _sizes(
        *(154880, 4096, 12288, 45, 64, 64, 1048576),
        moe_intermediate_size=2048,
        kv_lora_rank=512,
        q_lora_rank=1536,
        v_head_dim=256,
        qk_nope_head_dim=256,
        num_experts_per_tok=8,
        n_routed_experts=288,
    ),
    "nemotron_h": {
        **_sizes(131072, 4096, 21504, 4, 32, 8, 4096),
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
    },
    **dict.fromkeys(
        ("cohere2", "cohere_compass_text"), _sizes(256000, 8192, 22528, 40, 64, 64, 8192)
    ),
    "exaone4": _sizes(102400, 4096, 16384, 32, 32, 32, 2048, sliding_window=4096),
    "lfm2": _sizes(65536, 2560, 12288, 32, 32, 8, 128000),
    "lfm3": _sizes(128000, 2048, 7680, 24, 16, 4, 128000),
    "minimax_m3_vl_text": _sizes(
        *(200064, 6144, 3072, 60, 64, 4, 524288),
        rotary_dim=64,
        dense_intermediate_size=12288,
        shared_intermediate_size=3072,
        num_experts_per_tok=4,
        n_routed_experts=128,
    ),
}
_ROPE_KEYS = ("rope_parameters", "rope_scaling")


def with_text_config(config: Config) -> dict[str, Any]:
    """A multimodal config with its language model's config as `text_config`, where it has that
    under another key (InternVL), within the config of a part (Qwen-Omni) or among its own keys
    (MiniCPM-V). Other configs are returned as they are."""
    if isinstance(config.get("thinker_config"), dict):
        names = {key: config[key] for key in ("architectures", "model_type") if key in config}
        config = {**config["thinker_config"], **names}
    text = next((config[key] for key in _TEXT_KEYS if isinstance(config.get(key), dict)), None)
    if text is None and config.get("model_type") in ("minicpmv", "minicpmo"):
        version = str(config.get("version"))
        if version not in _MINICPM_VERSIONS:
            raise refusal(
                "version", config.get("version"), f"one of {', '.join(_MINICPM_VERSIONS)}"
            )
        text = {**config, "model_type": _MINICPM_VERSIONS[version], "architectures": None}
    if text is None or "text_config" in config:
        return dict(config)
    return {**config, "text_config": text}


def completed(text: Config, model_type: Any) -> dict[str, Any]:
    """A `text_config` with what it leaves out. The number of experts has several keys, of which
    that of the defaults counts last; a rotary embedding is that of the defaults as a whole.

    The names of its classes are left out: they may be those of the model it was made of (SmolVLM).
    """
    if not isinstance(model_type, str) or model_type not in DEFAULTS:
        return dict(text)
    found = {**DEFAULTS[model_type], **text}
    if any(key in text for key in _ROPE_KEYS) and "rope_parameters" not in text:
        found.pop("rope_parameters", None)
    found.pop("architectures", None)
    return found
