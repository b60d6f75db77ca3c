"""A tiny random checkpoint of every family of diffusion models that the engine opens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lfm2_checkpoints
import remedi_checkpoints
from anydecode.models.families.diffusion import diffusion_families
from diffusion_checkpoints import LAYERS, LLADA_NAMES, MASK, SIZES, Tiny, V, write, write_tokenizer
from dit_checkpoints import BD3LM, DUO, GIDD, write_dit

LLADA: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "activation_type": "silu",
    "block_type": "llama",
    "d_model": 32,
    "embedding_size": V,
    "eos_token_id": 60,
    "layer_norm_type": "rms",
    "mask_token_id": MASK,
    "max_sequence_length": 128,
    "mlp_hidden_size": 48,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": V,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LLADA2: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "moe_router_enable_expert_bias": True,
    "n_group": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "topk_group": 2,
    "use_qk_norm": True,
    "block_size": 4,
}
#: Queries that grow within the positions of a short text.
GROWING: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
}


def _like_qwen(
    architecture: str, model_type: str, own: dict[str, Any] | None = None, **tiny: Any
) -> Callable[[Path], None]:
    config = {**LAYERS, "architectures": [architecture], "model_type": model_type, **(own or {})}

    def build(folder: Path) -> None:
        write(Tiny(config, **tiny), folder)

    return build


def _llada2(**own: Any) -> Callable[[Path], None]:
    names = {
        "embed": "model.word_embeddings",
        "o": "attention.dense",
        "q_norm": "attention.query_layernorm",
        "k_norm": "attention.key_layernorm",
        "bias": "mlp.gate.expert_bias",
    }
    return _like_qwen(
        "LLaDA2MoeModelLM",
        "llada2_moe",
        {**LLADA2, **own},
        names=names,
        fused="attention.query_key_value",
        qk_norm=True,
        experts=8,
        has_bias=True,
        dense=(0,),
        shared=24,
    )


def _llada(folder: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    before = dict(SIZES)
    SIZES.update(heads)
    try:
        write(Tiny(LLADA, names=LLADA_NAMES), folder)
    finally:
        SIZES.update(before)


def _dit(config: dict[str, Any], **own: Any) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        write_dit(folder, {**config, "eos_token_id": 60, **own})
        write_tokenizer(folder, "<|mask|>" if "mask_token_id" in own else f"w{MASK}")

    return build


def _remedi(folder: Path) -> None:
    remedi_checkpoints.write(folder)


def _lfm2(folder: Path) -> None:
    lfm2_checkpoints.write(folder)


def _diffusion_gemma(folder: Path) -> None:
    pytest.importorskip("transformers.models.diffusion_gemma")
    import diffusion_gemma_models

    diffusion_gemma_models.reference(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))


_QWEN3: dict[str, Any] = {"qk_norm": True}
_NEMOTRON_NAMES = {
    "embed": "encoder.embed_tokens",
    "norm": "encoder.norm",
    "head": "diffusion_head",
    "layer": "encoder.layers.{}.",
}
#: By the key of a family, or a key of its own for other layers of one: what writes a checkpoint.
BUILDERS: dict[str, Callable[[Path], None]] = {
    "a2d-llama": _like_qwen("A2DLlamaLMHeadModel", "a2d-llama", {"block_size": 4}),
    "a2d-qwen2": _like_qwen("A2DQwen2LMHeadModel", "a2d-qwen2", biases=True),
    "a2d-qwen3": _like_qwen("A2DQwen3LMHeadModel", "a2d-qwen3", **_QWEN3),
    "bd3lm": _dit(BD3LM, mask_token_id=MASK),
    "mdlm": _dit({**BD3LM, "model_type": "mdlm", "cross_attn": False}, mask_token_id=MASK),
    "coda": _like_qwen("CoDALanguageModel", "CoDA", **_QWEN3),
    "diffusion_gemma_text": _diffusion_gemma,
    "dimple": _like_qwen("DimpleModel", "dimple", {"mrope_section": [2, 3, 3]}, biases=True),
    "dit": _dit(GIDD, mask_token_id=MASK),
    "duo": _dit(DUO),
    "dream": _like_qwen("DreamModel", "Dream", biases=True),
    "dreamon": _like_qwen("DreamModel", "Dream", {"expand_token_id": 62}, biases=True),
    "dream_reasoner": _like_qwen("DreamForCausalLM", "Dream", {"block_size": 4}, **_QWEN3),
    "efficient_dlm": _like_qwen("EfficientDLM", "qwen3", {"block_size": 4}, **_QWEN3),
    "efficient_dlm_qwen2": _like_qwen("EfficientDLM", "qwen2", {"block_size": 4}, biases=True),
    "fast_dllm_qwen": _like_qwen(
        "Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen", {"bd_size": 4}, biases=True
    ),
    "lfm2_diffusion": _lfm2,
    "llada": _llada,
    "llada2_moe": _llada2(),
    "llada2_2_moe": _llada2(expert_capacity=3, delete_token_id=58, split_token_id=59),
    "llada_moe": _like_qwen(
        "LLaDAMoEModelLM",
        "llada",
        {"expert_intermediate_size": 24, "dense_intermediate_size": 48, "qk_layernorm": True}
        | EXPERTS,
        experts=4,
        **_QWEN3,
    ),
    "llada_moe with a dense layer": _like_qwen(
        "LLaDAMoEModelLM",
        "llada",
        {
            "expert_intermediate_size": 24,
            "dense_intermediate_size": 48,
            "qk_layernorm": True,
            "moe_layer_freq": [0, 1],
        }
        | EXPERTS,
        experts=4,
        dense=(0,),
        **_QWEN3,
    ),
    "nemotron_labs_diffusion": _like_qwen(
        "NemotronLabsDiffusionModel",
        "nemotron_labs_diffusion",
        {"block_size": 4},
        names=_NEMOTRON_NAMES,
    ),
    "nemotron_labs_diffusion that grows": _like_qwen(
        "NemotronLabsDiffusionModel",
        "nemotron_labs_diffusion",
        {"block_size": 4, "rope_parameters": GROWING},
        names=_NEMOTRON_NAMES,
    ),
    "remedi": _remedi,
    "rnd1": _like_qwen("RND1LM", "rnd1", EXPERTS, experts=4, **_QWEN3),
    "sdar": _like_qwen("SDARForCausalLM", "sdar", {"block_size": 4}, **_QWEN3),
    "sdar_moe": _like_qwen(
        "SDARMoeForCausalLM", "sdar_moe", {"block_size": 4, **EXPERTS}, experts=4, **_QWEN3
    ),
    "stable_diffcoder": _like_qwen("StableDiffcoderForCausalLM", "llama", {"block_size": 4}),
    "wedlm": _like_qwen("WeDLMForCausalLM", "WeDLM", biases=True),
    "wedlm_qwen3": _like_qwen("WeDLMForCausalLM", "wedlm", {"qk_norm": True}, **_QWEN3),
}
#: Families that the files of a model do not name: their user does.
NAMED_BY_THE_USER = {"open_dllm"}
missing = {key for key, _ in diffusion_families()} - {*BUILDERS, *NAMED_BY_THE_USER}
assert not missing, f"no tiny checkpoint of {sorted(missing)}"
