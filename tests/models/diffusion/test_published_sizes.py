"""The configs of published diffusion models at their full sizes: what each row sees, where blocks
begin, what a row predicts, the mask token, and the decoder that the model opens with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from anydecode.errors import CheckpointError
from anydecode.models.families import spec_from_config
from anydecode.models.loading.llada import is_llada, to_hf_layout

QWEN: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DREAM: dict[str, Any] = {
    **QWEN,
    "architectures": ["DreamModel"],
    "auto_map": {
        "AutoConfig": "configuration_dream.DreamConfig",
        "AutoModel": "modeling_dream.DreamModel",
    },
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "mask_token_id": 151666,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "Dream",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pad_token_id": 151643,
    "vocab_size": 152064,
}
LLADA: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModel": "modeling_llada.LLaDAModelLM",
    },
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": 126464,
    "weight_tying": False,
}
LLADA2: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "model_type": "llada2_moe",
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_head": False,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "output_router_logits": False,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "vocab_size": 157184,
}
LLADA2_FLASH = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
}
QWEN3_8B = {
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
}
EXPERTS_30B = {
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronLabsDiffusionModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_implementation": "sdpa",
    "block_size": 32,
    "bos_token_id": 1,
    "dlm_loss_weight": None,
    "dlm_paradigm": "bidirectional",
    "dp_varying_mask_ratio": False,
    "eos_token_id": 11,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mask_token_id": 100,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "model_type": "nemotron_labs_diffusion",
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}


@dataclass(frozen=True)
class Published:
    """What a published model is.

    Attributes:
        config: Its config.json.
        mask: The mask token, from the config or its family; None: the tokenizer names it.
        block: The positions of a block; None: every row sees the whole canvas.
        shift: 1 if a row predicts the position after its own.
        origin: Where blocks are counted from: "start", or "prompt" for the end of the prompt.
        context: What the rows before a block see: "blocks", "causal" or "whole".
        decoder: The decoder of its own, if it has one.
        num_experts: Experts of the last layer.
    """

    config: dict[str, Any]
    mask: int | None
    block: int | None = None
    shift: int = 0
    origin: str = "start"
    context: str = "blocks"
    decoder: str | None = None
    num_experts: int = 0


def sdar(config: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    return {**QWEN, **config, "architectures": [name], "attention_bias": False, **changes}


MODELS = {
    "LLaDA-8B-Instruct": Published(LLADA, 126336),
    "Dream-v0-Instruct-7B": Published(DREAM, 151666, shift=1),
    "DreamOn-v0-7B": Published(
        {**DREAM, "expand_token_id": 151667}, 151666, shift=1, decoder="dream-coder"
    ),
    "LLaDA2.0-mini": Published(LLADA2, 156895, 32, decoder="sdar:threshold=0.95", num_experts=256),
    "LLaDA2.1-flash": Published(
        {**LLADA2, **LLADA2_FLASH}, 156895, 32, decoder="sdar:threshold=0.95", num_experts=256
    ),
    "SDAR-8B-Chat": Published(sdar(QWEN3_8B, "SDARForCausalLM", model_type="sdar"), 151669, 4),
    "SDAR-30B-A3B-Chat": Published(
        sdar(EXPERTS_30B, "SDARMoeForCausalLM", model_type="sdar_moe"), 151669, 4, num_experts=128
    ),
    "Fast_dLLM_v2_7B": Published(
        {
            **DREAM,
            "architectures": ["Fast_dLLM_QwenForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM"},
            "bd_size": 32,
            "layer_types": ["full_attention"] * 28,
            "mask_token_id": 151665,
            "model_type": "Fast_dLLM_Qwen",
        },
        151665,
        32,
        shift=1,
        decoder="fast-dllm-v2",
    ),
    "Efficient-DLM-8B": Published(
        {**QWEN, **QWEN3_8B, "architectures": ["EfficientDLM"], "model_type": "edlm",
         "block_size": 32},
        None,
        32,
        origin="prompt",
        context="whole",
        decoder="sdar:threshold=0.9",
    ),
    "Nemotron-Labs-Diffusion-8B": Published(
        NEMOTRON,
        100,
        32,
        origin="prompt",
        context="causal",
        decoder="fast-dllm-v2:sub_block=32,threshold=0.9",
    ),
    "Nemotron-Labs-Diffusion-3B-Base": Published(
        {**NEMOTRON, "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26,
         "eos_token_id": 2, "max_position_embeddings": 4096},
        100,
        32,
        origin="prompt",
        context="causal",
        decoder="fast-dllm-v2:sub_block=32,threshold=0.9",
    ),
    "CoDA-v0-Instruct": Published(
        {
            **{key: value for key, value in QWEN.items() if key != "tie_word_embeddings"},
            **QWEN3_8B,
            "architectures": ["CoDALanguageModel"],
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mask_token_id": 151669,
            "model_type": "CoDA",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "pad_token_id": 151643,
        },
        151669,
        shift=1,
    ),
    "RND1-Base-0910": Published(
        {**QWEN, **EXPERTS_30B, "architectures": ["RND1LM"], "model_type": "rnd1",
         "mask_token_id": 151669, "num_diffusion_steps": 256},
        151669,
        shift=1,
        num_experts=128,
    ),
    "LLaDA-MoE-7B-A1B-Instruct": Published(
        {
            "architectures": ["LLaDAMoEModelLM"],
            "auto_map": {"AutoModel": "modeling_lladamoe.LLaDAMoEModelLM"},
            "clip_qkv": None,
            "dense_intermediate_size": 8192,
            "eos_token_id": 156892,
            "expert_intermediate_size": 1024,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "max_position_embeddings": 8192,
            "model_type": "llada",
            "moe_layer_freq": [1] * 16,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "pad_token_id": 156892,
            "partial_rotary_factor": 1,
            "qk_layernorm": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 50000,
            "tie_word_embeddings": False,
            "vocab_size": 157184,
        },
        156895,
        num_experts=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_published_config_is_read_as_the_model_is(name: str) -> None:
    model = MODELS[name]
    config = model.config
    if is_llada(config):
        config, _ = to_hf_layout(config, {})
    spec = spec_from_config(config)
    assert not spec.causal and spec.vocab_size >= 126464
    assert (spec.block_size, spec.logit_shift) == (model.block, model.shift)
    assert (spec.decoder, spec.layers[-1].num_experts) == (model.decoder, model.num_experts)
    starts_at_end = spec.has_causal_context or spec.has_prompt_block
    assert ("prompt" if starts_at_end else "start") == model.origin
    whole = "whole" if spec.has_prompt_block else "blocks"
    assert ("causal" if spec.has_causal_context else whole) == model.context
    assert spec.mask_token == model.mask


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Efficient-DLM-8B", {"block_size": None}, "block= "),
        ("Nemotron-Labs-Diffusion-8B", {"block_size": None}, "block= "),
        ("SDAR-8B-Chat", {"architectures": ["SDAR2"]}, "SDAR2 of model type 'sdar'"),
        ("Dream-v0-Instruct-7B", {"mask_token_id": 152064}, "mask_token_id is 152064"),
        ("LLaDA2.0-mini", {"score_function": "softmax"}, "score_function is 'softmax'"),
    ],
)
def test_what_cannot_be_known_is_an_error(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        spec_from_config({**MODELS[name].config, **change})
    assert "\n" not in str(caught.value)
