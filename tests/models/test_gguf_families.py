"""GGUF files as llama.cpp's converter writes them, by the tensor names of the package `gguf`,
against the same models in `transformers`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Experts
from anydecode.quantization.gguf import quantize_file
from gguf_models import finish, interleave, tensor_names, usual_metadata, writer_with
from llama_cpp_logits import GELU_MARGIN, llama_cpp_logits
from tiny_models import built, chain, checkpoint_of, hf_logits, hf_model, logits

TOKENS = [(7 * i + 3) % 131 for i in range(24)]
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass
class Case:
    """A model of `transformers` and its GGUF file.

    `metadata` are the keys that the converter adds to those of every model. If `is_permuted`, it
    reorders the rows of queries and keys.
    """

    family: str
    architecture: str
    settings: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    is_permuted: bool = False


ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_METADATA: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
OLMO_3: dict[str, Any] = {
    "layer_types": SLIDING,
    "sliding_window": 6,
    "rope_parameters": {
        "full_attention": {**YARN, "attention_factor": 1.2},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}
OLMO_3_METADATA: dict[str, Any] = {
    **YARN_METADATA,
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [True, False, True],
}
LAYER_NORM: dict[str, Any] = {
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": None,
}
#: Families whose norms the converter stores with 1 added.
ONE_ADDED = ("Gemma", "Nemotron")
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}
MAMBA: dict[str, Any] = {
    "context_length": 1 << 20,
    "feed_forward_length": 0,
    "attention.head_count": 0,
    "attention.head_count_kv": None,
    "attention.key_length": None,
    "attention.value_length": None,
    "rope.freq_base": None,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 80,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 3,
}
GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
GEMMA_4: dict[str, Any] = {
    "initializer_range": 0.05,
    "num_hidden_layers": 6,
    "layer_types": GEMMA_LAYERS,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 131,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 9.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}  # fmt: skip
GEMMA_4_METADATA: dict[str, Any] = {
    "feed_forward_length": [80] * 3 + [160] * 3,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.key_length_swa": 8,
    "attention.value_length_swa": 8,
    "attention.shared_kv_layers": 3,
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [True, True, False] * 2,
    "embedding_length_per_layer_input": 12,
    "final_logit_softcapping": 9.0,
    "rope.dimension_count": 16,
    "rope.dimension_count_swa": 8,
    "rope.freq_base": 1e5,
    "rope.freq_base_swa": 500.0,
}
GEMMA_4_EXPERTS: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 7,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
GEMMA_4_EXPERTS_METADATA: dict[str, Any] = {
    "feed_forward_length": 80,
    "attention.head_count_kv": [2, 2, 1] * 2,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "expert_count": 7,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
}
GEMMA_3N: dict[str, Any] = {
    "initializer_range": 0.05,
    "num_hidden_layers": 6,
    "layer_types": GEMMA_LAYERS,
    "head_dim": 8,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 131,
    "num_kv_shared_layers": 3,
    "laurel_rank": 6,
    "intermediate_size": [80, 80, 80, 56, 56, 56],
    "activation_sparsity_pattern": [0.95, 0.7, 0.0, 0.0, 0.0, 0.0],
    "final_logit_softcapping": 9.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
GEMMA_3N_METADATA: dict[str, Any] = {
    "feed_forward_length": [80, 80, 80, 56, 56, 56],
    "attention.shared_kv_layers": 3,
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [True, True, False] * 2,
    "embedding_length_per_layer_input": 12,
    "final_logit_softcapping": 9.0,
    "altup.active_idx": 0,
    "altup.num_inputs": 4,
    "activation_sparsity_scale": [1.6448536, 0.5244005] + [-math.inf] * 4,
    "rope.freq_base": 1e5,
    "rope.freq_base_swa": 500.0,
}
LLAMA_4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 12,
    "intermediate_size_mlp": 72,
    "num_local_experts": 5,
}
LLAMA_4_METADATA: dict[str, Any] = {
    "feed_forward_length": 72,
    "expert_count": 5,
    "expert_used_count": 1,
    "expert_feed_forward_length": 80,
    "interleave_moe_layer_step": 1,
    "rope.dimension_count": 12,
}
LONG = [1.0, 1.1, 1.3, 1.5, 1.7, 2.0]
HUNYUAN = {
    "head_dim": 12,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "dynamic",
        "alpha": 50.0,
        "factor": 1.0,
        "rope_theta": 5000.0,
    },
}
CASES = {
    "granite": Case(
        "Granite",
        "granite",
        GRANITE,
        {
            "attention.scale": 0.3,
            "embedding_scale": 3.0,
            "residual_scale": 0.4,
            "logit_scale": 2.5,
        },
        is_permuted=True,
    ),
    "granite without factors": Case(
        "Granite", "granite", {"attention_multiplier": 12**-0.5}, is_permuted=True
    ),
    "minicpm": Case(
        "Granite",
        "minicpm",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 12**-0.5,
            "residual_multiplier": 1.4 / 3**0.5,
            "logits_scaling": 1.5,
            "tie_word_embeddings": True,
        },
        {"embedding_scale": 6.0, "residual_scale": 1.4 / 3**0.5, "logit_scale": 1.5},
        is_permuted=True,
    ),
    "minicpm longrope": Case(
        "Granite",
        "minicpm",
        {
            "attention_multiplier": 12**-0.5,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                "original_max_position_embeddings": 128,
                "short_factor": LONG,
                "long_factor": LONG,
            },
        },
        {
            "embedding_scale": 1.0,
            "residual_scale": 1.0,
            "logit_scale": 1.0,
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 128,
        },
        is_permuted=True,
    ),
    "bitnet": Case(
        "BitNet",
        "bitnet",
        {"tie_word_embeddings": True, "hidden_act": "silu"},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
    ),
    "bitnet squares": Case(
        "BitNet", "bitnet", {"tie_word_embeddings": True}, {"hidden_activation": "relu2"}
    ),
    "lfm2": Case(
        "Lfm2",
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0]},
    ),
    "mamba": Case(
        "Mamba",
        "mamba",
        {"time_step_rank": 5, "state_size": 12, "use_conv_bias": False},
        {**MAMBA, "ssm.state_size": 12, "ssm.time_step_rank": 5},
    ),
    "falcon mamba": Case(
        "FalconMamba",
        "mamba",
        {"tie_word_embeddings": False, "use_bias": True},
        {**MAMBA, "ssm.dt_b_c_rms": True},
    ),
    "gemma3n": Case("Gemma3n", "gemma3n", GEMMA_3N, GEMMA_3N_METADATA),
    "gemma4": Case("Gemma4", "gemma4", GEMMA_4, GEMMA_4_METADATA),
    "gemma4 experts": Case(
        "Gemma4",
        "gemma4",
        {**GEMMA_4, **GEMMA_4_EXPERTS},
        {**GEMMA_4_METADATA, **GEMMA_4_EXPERTS_METADATA},
    ),
    "qwen2 vl": Case(
        "Qwen2",
        "qwen2vl",
        {},
        {"rope.dimension_count": 12, "rope.dimension_sections": [2, 2, 2, 0]},
    ),
    "qwen3 vl": Case(
        "Qwen3",
        "qwen3vl",
        {"head_dim": 16},
        {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 0},
    ),
    "glm4": Case("Glm4", "glm4", {"head_dim": 16}, {"rope.dimension_count": 8}),
    "glm4 no bias": Case(
        "Glm4", "glm4", {"head_dim": 16, "attention_bias": False}, {"rope.dimension_count": 8}
    ),
    "ernie4_5": Case("Ernie4_5", "ernie4_5", {"head_dim": 16}),
    "paddleocr": Case(
        "Llama",
        "paddleocr",
        {"head_dim": 16},
        {"rope.dimension_count": 16, "rope.dimension_sections": [2, 3, 3, 0]},
    ),
    "seed_oss": Case("SeedOss", "seed_oss", {"head_dim": 16}),
    "olmo3": Case(
        "Olmo3",
        "olmo2",
        OLMO_3,
        {**OLMO_3_METADATA, "rope.scaling.attn_factor": 1.2},
    ),
    "olmo3 of new files": Case(
        "Olmo3",
        "olmo2",
        OLMO_3,
        {**OLMO_3_METADATA, "rope.scaling.yarn_attn_factor": 1.2},
    ),
    "ministral3": Case(
        "Ministral3",
        "mistral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
        {
            **YARN_METADATA,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.5,
        },
        is_permuted=True,
    ),
    "mistral small": Case(
        "Mistral",
        "mistral3",
        {"head_dim": 16, "sliding_window": None},
        is_permuted=True,
    ),
    "phi4 mini": Case(
        "Phi3",
        "phi3",
        {
            "hidden_size": 64,
            "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                "short_factor": LONG,
                "long_factor": LONG,
            },
        },
        {
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(2) / np.log(128))),
        },
    ),
    "exaone4": Case(
        "Exaone4",
        "exaone4",
        {"layer_types": SLIDING, "sliding_window": 6},
        {
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [True, False, True],
        },
    ),
    "exaone4 no window": Case(
        "Exaone4",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    # The converter multiplies theta instead of storing alpha.
    "hunyuan": Case(
        "HunYuanDenseV1",
        "hunyuan-dense",
        HUNYUAN,
        {
            "rope.freq_base": 5000.0 * 50.0 ** (12 / 10),
            "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0,
        },
    ),
    "hunyuan vl": Case(
        "HunYuanDenseV1",
        "hunyuan_vl",
        HUNYUAN,
        {
            "rope.scaling.alpha": 50.0,
            "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0,
            # llama.cpp gives texts 0 as the fourth position; `transformers` gives the same to all.
            "rope.dimension_sections": [2, 2, 2, 0],
        },
    ),
    "starcoder2": Case("Starcoder2", "starcoder2"),
    "starcoder2 no bias": Case("Starcoder2", "starcoder2", {"use_bias": False}),
    "cohere": Case("Cohere", "command-r", {"logit_scale": 0.5}, {"logit_scale": 0.5}),
    "cohere norms": Case(
        "Cohere", "command-r", {"logit_scale": 0.5, "use_qk_norm": True}, {"logit_scale": 0.5}
    ),
    "cohere2": Case(
        "Cohere2",
        "cohere2",
        {"logit_scale": 0.5, "sliding_window": 6, "num_hidden_layers": 4},
        {"logit_scale": 0.5, "attention.sliding_window": 6},
    ),
    "gemma": Case("Gemma", "gemma", {"head_dim": 16}),
    "phi": Case(
        "Phi",
        "phi2",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "num_key_value_heads": 4},
        {"rope.dimension_count": 6},
    ),
    "stablelm": Case(
        "StableLm",
        "stablelm",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 6, "use_parallel_residual": True},  # as the converter writes it
    ),
    "stablelm norms": Case(
        "StableLm",
        "stablelm",
        {
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        {"rope.dimension_count": 6, "use_parallel_residual": True},
    ),
    "stablelm parallel": Case(
        "StableLm",
        "stablelm",
        {
            "use_qkv_bias": True,
            "use_parallel_residual": True,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        {"rope.dimension_count": 6, "use_parallel_residual": True},
    ),
    "olmo": Case(
        "Olmo",
        "olmo",
        {"clip_qkv": 0.5},
        {**LAYER_NORM, "attention.clamp_kqv": 0.5},
        is_permuted=True,
    ),
    "glm": Case(
        "Glm",
        "chatglm",
        {"head_dim": 12, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 6},
    ),
    "nemotron": Case(
        "Nemotron",
        "nemotron",
        {"head_dim": 12, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        {**LAYER_NORM, "rope.dimension_count": 6},
    ),
    "apertus": Case(
        "Apertus",
        "apertus",
        {
            "head_dim": 12,
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
    "arcee": Case("Arcee", "arcee", {"head_dim": 12}, is_permuted=True),
    "gpt2": Case("GPT2", "gpt2"),
    "exaone": Case("Llama", "exaone", {"rms_norm_eps": 1e-5}),
    "internlm2": Case("Llama", "internlm2", is_permuted=True),
    "starcoder": Case("GPTBigCode", "starcoder", {}, {"attention.head_count_kv": 1}),
    "gpt neox": Case(
        "GPTNeoX",
        "gptneox",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 6, "use_parallel_residual": True},
    ),
    "gpt neox sequential": Case(
        "GPTNeoX",
        "gptneox",
        {
            "use_parallel_residual": False,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
        },
        {"rope.dimension_count": 12, "use_parallel_residual": False},
    ),
    "falcon": Case("Falcon", "falcon", {"ffn_hidden_size": 192}),
    "jais2": Case("Jais2", "jais2", {}, {"rope.dimension_count": 12}),
    "llama4": Case("Llama4", "llama4", LLAMA_4, LLAMA_4_METADATA),
    "llama4 dense": Case(
        "Llama4",
        "llama4",
        {
            **LLAMA_4,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
        },
        {**LLAMA_4_METADATA, "interleave_moe_layer_step": 2, "expert_used_count": 2},
    ),
    "bloom": Case("Bloom", "bloom", {"num_attention_heads": 6}),
    "mpt": Case("Mpt", "mpt", {}, {"attention.max_alibi_bias": 8.0}),
    "mpt odd": Case(
        "Mpt",
        "mpt",
        {
            "num_attention_heads": 6,
            "attn_config": {"clip_qkv": 0.7},
        },
        {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.7},
    ),
    "dbrx": Case(
        "Dbrx",
        "dbrx",
        {
            "d_model": 48,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 5000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 2},
        },
        {
            "feed_forward_length": 24,
            "attention.layer_norm_epsilon": 1e-5,
            "attention.clamp_kqv": 0.7,
            "expert_count": 5,
            "expert_used_count": 2,
        },
    ),
    "falcon new": Case(
        "Falcon", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
    ),
}


#: Modules of BitNet, and the names that the package knows them by.
_OTHER_NAMES = {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"}
#: Vectors of Gemma 4's routers, which the converter stores beside a matrix.
_ROUTER_SCALES = {"scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}


def converted(model: Any, case: Case, path: Path, **changes: Any) -> Path:
    """Write the model of a case as a GGUF file; `changes` replace or remove (None) metadata."""
    config = checkpoint_of(model).config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    num_layers = config["num_hidden_layers"]
    numbers = {key: changes.pop(key) for key in list(changes) if key.startswith("xielu.")}
    metadata = {**usual_metadata(config, num_layers), **case.metadata, **changes}
    writer = writer_with(path, case.architecture, metadata, config["vocab_size"])
    names = tensor_names(case.architecture, num_layers)
    for key, values in {**_xielu(model), **numbers}.items():
        if isinstance(values, list):
            writer.add_array(key, values)
        elif values is not None:
            writer.add_float32(key, values)
    for name, parameter in _stored(model):
        if ".act_fn." in name:
            continue
        if name in ("lm_head.weight", "embed_out.weight") and config["tie_word_embeddings"]:
            continue
        tensor = parameter.numpy()
        if case.family == "GPT2" and ".h." in name:
            tensor = tensor.T
        if "query_key_value" in name:
            # The converter stores all queries, all keys, all values.
            shape = (kv_heads, heads // kv_heads + 2, head_dim, *tensor.shape[1:])
            groups = tensor.reshape(shape)
            parts = groups[:, :-2], groups[:, -2], groups[:, -1]
            tensor = np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])
        if case.is_permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleave(tensor, heads if "q_proj" in name else kv_heads)
        if case.family in ONE_ADDED and name.endswith("norm.weight"):
            tensor = tensor + 1
        tensor = tensor.squeeze(1) if tensor.ndim == 3 and "conv" in name else tensor
        tensor = -np.exp(tensor) if name.endswith("A_log") else tensor
        if "." not in name.removeprefix("model.layers.")[2:] or ".experts." in name:
            name = f"{name}.weight"
        if case.family == "Bloom":
            name = name.removeprefix("transformer.")
        for own, known in _OTHER_NAMES.items():
            name = name.replace(own, known)
        module, _, leaf = name.rpartition(".")
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if module.endswith(".router") and leaf in _ROUTER_SCALES:
            target = f"blk.{name.split('.')[2]}.{_ROUTER_SCALES[leaf]}.scale"
        assert target is not None, name
        writer.add_tensor(target, np.ascontiguousarray(tensor, np.float32))
    factors = (config.get("rope_parameters") or {}).get("long_factor")
    if factors is not None:
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(factors, np.float32))
    if case.family == "Apertus":
        found = model.model.rotary_emb.inv_freq.numpy()
        plain = ROPE["rope_theta"] ** -(np.arange(len(found)) / len(found))
        writer.add_tensor("rope_freqs.weight", (plain / found).astype(np.float32))
    if case.architecture == "gemma4":
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * 2 + [1e30] * 6, np.float32))
    finish(writer)
    return path


def _xielu(model: Any) -> dict[str, list[float]]:
    """The numbers of the activations of Apertus, which the converter writes as metadata."""
    numbers: dict[str, list[float]] = {}
    for name, tensor in model.state_dict().items():
        if ".act_fn." in name:
            numbers.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(tensor.item())
    return numbers


def _stored(model: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of a model; the experts of Llama 4 as matrices `[experts, out, in]`, and the
    projections of streams of Gemma 3n and the norms of heads of StableLM 2 as stacks."""
    import torch

    stacks: dict[str, list[Any]] = {}
    for name, parameter in model.state_dict().items():
        if "feed_forward.experts.gate_up_proj" in name:
            for part, half in zip(("gate", "up"), parameter.chunk(2, -1), strict=True):
                yield name.replace("gate_up", part), half.transpose(1, 2)
        elif "feed_forward.experts" in name:
            yield name, parameter.transpose(1, 2)
        elif "ffn.experts" in name:
            stack = parameter.view(-1, model.config.ffn_config.ffn_hidden_size, parameter.shape[1])
            yield name, stack.transpose(1, 2) if name.endswith("w2") else stack
        elif name.startswith(("model.altup_projections", "model.altup_unembed_projections")):
            stacks.setdefault(name.split(".")[1], []).append(parameter)
        elif "_layernorm.norms." in name:
            stacks.setdefault(name.removeprefix("model.").split(".norms.")[0], []).append(parameter)
        elif name.endswith("correct_output_scale"):
            yield f"{name}.weight", parameter
        else:
            yield name, parameter
    for name, parts in stacks.items():
        yield f"model.{name}.weight", torch.stack(parts)


def original(case: Case) -> Any:
    settings = {"rope_parameters": dict(ROPE), **case.settings}
    if case.family == "Glm4":
        settings["rope_parameters"]["partial_rotary_factor"] = 0.5
    return hf_model(case.family, **settings)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = original(case)
    checkpoint = load_checkpoint(converted(model, case, tmp_path / "tiny.gguf"))
    found = logits(built(checkpoint), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4


#: Why llama.cpp v0.5.0 opens a file not at all, or as another model.
NOT_OF_LLAMA_CPP = {
    "bitnet squares": "it has SiLU whatever the file says",
    "granite without factors": "it requires the factors, which the converter always writes",
    "minicpm longrope": "it has no attention factor for contexts longer than the original one",
    "cohere norms": "it has norms of queries and keys in models of 64 layers only",
    "gemma3n": "it has the sizes of the published models",
    "exaone4": "it has windows in models of 64 layers only",
    "olmo3": "it multiplies the usual attention factor by the one of the file",
    "starcoder2 no bias": "it requires biases",
}
MAMBA_IN_LLAMA_CPP = {"intermediate_size": 96}
#: Settings and metadata with which llama.cpp opens a model.
FOR_LLAMA_CPP: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mamba": ({**MAMBA_IN_LLAMA_CPP, "use_conv_bias": True}, {"ssm.inner_size": 96}),
    "falcon mamba": ({**MAMBA_IN_LLAMA_CPP, "use_bias": False}, {"ssm.inner_size": 96}),
    "falcon new": ({"bias": False}, {}),
    "olmo3 of new files": (  # every fourth layer has no window, and the attention factor is usual
        {
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 0.1 * math.log(4.0) + 1.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
        {
            "rope.scaling.yarn_attn_factor": 0.1 * math.log(4.0) + 1.0,
            "attention.sliding_window_pattern": [True] * 3 + [False],
        },
    ),
}
GELU = (
    "GPTBigCode",
    "Gemma",
    "Gemma4",
    "Phi",
    "Starcoder2",
    "GPT2",
    "GPTNeoX",
    "Falcon",
    "Bloom",
    "Mpt",
)


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_OF_LLAMA_CPP])
def test_logits_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    settings, metadata = FOR_LLAMA_CPP.get(name, ({}, {}))
    case = CASES[name]
    case = replace(
        case,
        settings={**case.settings, **settings},
        metadata={**case.metadata, **metadata},
    )
    path = converted(original(case), case, tmp_path / "tiny.gguf")
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    margin = GELU_MARGIN if case.family in GELU else 1e-4
    if name == "qwen2 vl":
        margin = 1e-3  # its rotary embedding with sections is less exact
    assert np.abs(found - llama_cpp_logits(path, TOKENS)).max() < margin


def test_the_gates_of_mamba_are_not_quantised(tmp_path: Path) -> None:
    sizes = {"ssm.inner_size": 128, "ssm.time_step_rank": 4}
    case = Case(
        "Mamba",
        "mamba",
        {"hidden_size": 64, "intermediate_size": 128},
        {**MAMBA, **sizes},
    )
    model = original(case)
    path = converted(model, case, tmp_path / "tiny.gguf")
    quantize_file(path, tmp_path / "small.gguf", "q8_0")
    checkpoint = load_checkpoint(tmp_path / "small.gguf")
    network = built(checkpoint)
    layer = network.network.weights.layers[0].recurrent
    assert layer is not None
    names = ("inputs", "gate", "output", "gates", "keys", "queries", "step_down")
    formats = [getattr(layer, name).weight.format for name in names]
    assert formats == ["Q8_0"] * 3 + ["F32"] * 4
    found, expected = logits(network, chain(TOKENS)), hf_logits(model, TOKENS)
    assert 0 < np.abs(found - expected).mean() < 0.05 * np.abs(expected).mean()


def test_quantised_experts_of_gemma4_keep_their_factors(tmp_path: Path) -> None:
    """The vectors beside the router and the experts are no factors of quantised weights. All
    experts are used, so that rounding does not choose others."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    case = CASES["gemma4 experts"]
    count = case.metadata["expert_count"]
    sizes["top_k_experts"] = count
    metadata = {**case.metadata, "feed_forward_length": 96, "expert_feed_forward_length": 32}
    metadata["expert_used_count"] = count
    case = Case("Gemma4", "gemma4", {**case.settings, **sizes}, metadata)
    model = original(case)
    path = converted(model, case, tmp_path / "tiny.gguf")
    quantize_file(path, tmp_path / "small.gguf", "q8_0")
    network = built(load_checkpoint(tmp_path / "small.gguf"))
    mlp = network.network.weights.layers[0].mlp
    assert isinstance(mlp, Experts)
    formats = {weight.format for weight in mlp.routed.matrices}
    assert (formats, mlp.router.weight.format) == ({"Q8_0"}, "F32")
    assert {weight.scale for weight in mlp.routed.matrices} == {1.0}
    found, expected = logits(network, chain(TOKENS)), hf_logits(model, TOKENS)
    assert 0 < np.abs(found - expected).mean() < 0.1 * np.abs(expected).mean()


def test_the_small_matrices_of_streams_are_not_quantised(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "laurel_rank": 32}
    metadata = {**GEMMA_3N_METADATA, "feed_forward_length": 96}
    settings = {**GEMMA_3N, **sizes, "hidden_size_per_layer_input": 32}
    case = Case(
        "Gemma3n", "gemma3n", settings, {**metadata, "embedding_length_per_layer_input": 32}
    )
    model = original(case)
    path = converted(model, case, tmp_path / "tiny.gguf")
    quantize_file(path, tmp_path / "small.gguf", "q8_0")
    network = built(load_checkpoint(tmp_path / "small.gguf"))
    block = network.network.weights.layers[0].streams
    assert block is not None
    names = ("residual_down", "residual_up", "router", "prediction", "correction")
    formats = [getattr(block, name).weight.format for name in names]
    assert formats == ["F32"] * 5
    found, expected = logits(network, chain(TOKENS)), hf_logits(model, TOKENS)
    assert 0 < np.abs(found - expected).mean() < 0.1 * np.abs(expected).mean()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("granite", {"attention.scale": 0.2}),
        ("granite", {"embedding_scale": None}),
        ("granite", {"residual_scale": None}),
        ("granite", {"logit_scale": None}),
        ("minicpm", {"residual_scale": 0.5}),
        ("minicpm", {"logit_scale": 3.0}),
        ("glm4", {"rope.dimension_count": None}),
        ("olmo3", {"rope.scaling.attn_factor": None}),
        ("olmo3", {"attention.sliding_window_pattern": None}),
        ("ministral3", {"attention.temperature_scale": None}),
        ("ministral3", {"rope.scaling.yarn_log_multiplier": None}),
        ("exaone4", {"attention.sliding_window_pattern": [False, False, True]}),
        ("hunyuan", {"rope.freq_base": 5000.0}),
        ("cohere", {"logit_scale": 1.0}),
        ("cohere2", {"attention.sliding_window": 5}),
        ("gpt neox", {"rope.dimension_count": 12}),
        ("gpt neox", {"use_parallel_residual": False}),
        ("phi", {"rope.dimension_count": 4}),
        ("stablelm", {"rope.dimension_count": 12}),
        ("olmo", {"attention.clamp_kqv": 0.0}),
        ("glm", {"rope.dimension_count": 4}),
        ("apertus", {"xielu.alpha_p": [0.2] * 3}),
        ("apertus", {"xielu.alpha_n": -0.5}),
        ("apertus", {"xielu.beta": 0.4}),
        ("nemotron", {"rope.dimension_count": 4}),
        ("starcoder2", {"attention.layer_norm_epsilon": 0.1}),
        ("falcon mamba", {"ssm.dt_b_c_rms": None}),
        ("mpt", {"attention.max_alibi_bias": 16.0}),
        ("gemma3n", {"altup.active_idx": 1}),
        ("gemma3n", {"activation_sparsity_scale": [-math.inf] * 6}),
        ("gemma3n", {"rope.freq_base_swa": None}),
        ("gemma3n", {"final_logit_softcapping": None}),
        ("gemma3n", {"attention.sliding_window": 5}),
        ("llama4", {"rope.freq_base": 500.0}),
        ("llama4 dense", {"expert_used_count": 1}),
        ("mpt odd", {"attention.clamp_kqv": None}),
        ("dbrx", {"attention.clamp_kqv": None}),
        ("dbrx", {"expert_used_count": 1}),
        ("gemma4", {"rope.freq_base_swa": None}),
        ("gemma4", {"rope.freq_base": 500.0}),
        ("gemma4", {"attention.sliding_window": 5}),
        ("gemma4", {"final_logit_softcapping": None}),
        ("gemma4 experts", {"expert_used_count": 2}),
    ],
)
def test_every_key_changes_the_logits(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    """Negative controls: with one key changed or left out, the logits exceed the margin above."""
    case = CASES[name]
    model = original(case)
    checkpoint = load_checkpoint(converted(model, case, tmp_path / "tiny.gguf", **change))
    found = logits(built(checkpoint), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("granite", {"residual_scale": float("nan")}, "residual_scale"),
        ("granite", {"logit_scale": -1.0}, "logits_scaling"),
        ("minicpm", {"logit_scale": 0.0}, "dim_model_base"),
        ("glm4", {"rope.dimension_count": 99}, "rotary size"),
        ("lfm2", {"attention.head_count_kv": 2}, "head_count_kv is 2; allowed is a list"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, "allowed is a list of 3 integers"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 2]}, "layers.2.self_attn.out_proj"),
        ("lfm2", {"shortconv.l_cache": 0}, "shortconv.l_cache is 0"),
        ("lfm2", {"shortconv.l_cache": 4}, "conv.conv.weight.* has shape"),
        ("mamba", {"ssm.dt_b_c_rms": 1}, "ssm.dt_b_c_rms is 1; allowed is true or false"),
        ("mamba", {"ssm.time_step_rank": 4}, "mixer.x_proj.weight.* has shape"),
        ("mamba", {"ssm.state_size": 0}, "ssm.state_size is 0"),
        ("mamba", {"ssm.conv_kernel": 3}, "mixer.conv1d.weight.* has shape"),
        ("mamba", {"ssm.inner_size": None}, "ssm.inner_size is missing"),
        ("olmo3", {"attention.sliding_window": "x"}, "attention.sliding_window"),
        ("exaone4", {"attention.sliding_window_pattern": [True]}, "1 entries for 3 layers"),
        ("exaone4", {"attention.sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("ministral3", {"attention.temperature_scale": -1.0}, "llama_4_scaling_beta"),
        ("gpt neox", {"use_parallel_residual": 3}, "use_parallel_residual"),
        ("olmo", {"attention.clamp_kqv": -1.0}, "clip_qkv is -1.0"),
        ("phi", {"rope.dimension_count": 99}, "rotary size"),
        ("apertus", {"xielu.alpha_p": None}, "xielu.alpha_p is None"),
        ("apertus", {"xielu.eps": [-1e-6] * 2}, "xielu.eps is .* a list of 3 numbers"),
        ("apertus", {"xielu.beta": math.nan}, "xielu.beta is nan"),
        ("starcoder2", {"attention.layer_norm_epsilon": 2.0}, "layer_norm_eps"),
        ("gpt2", {"context_length": 300}, "embed_positions"),
        ("gemma3n", {"altup.num_inputs": 3}, "allowed are 2 matrices"),
        ("gemma3n", {"altup.num_inputs": 1}, "altup.num_inputs is 1"),
        ("gemma3n", {"altup.active_idx": 4}, "active_stream is 4"),
        ("gemma3n", {"activation_sparsity_scale": [1.0]}, "a list of 6 numbers"),
        ("gemma3n", {"activation_sparsity_scale": [math.nan] * 6}, "gate_cutoff is nan"),
        ("gemma3n", {"activation_sparsity_scale": None}, "activation_sparsity_scale is missing"),
        ("gemma3n", {"attention.shared_kv_layers": 4}, "no earlier layer|is missing"),
        ("llama4", {"attention.sliding_window": 0}, "without chunked attention"),
        ("llama4", {"expert_count": None}, "expert_count is missing"),
        ("llama4", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0"),
        ("llama4", {"interleave_moe_layer_step": 2}, "feed_forward.*is missing"),
        ("llama4", {"expert_feed_forward_length": 72}, "has shape"),
        ("llama4", {"expert_used_count": 9}, "experts_per_token is 9"),
        ("mpt", {"attention.max_alibi_bias": 0.0}, "alibi_bias_max is 0.0"),
        ("mpt", {"attention.max_alibi_bias": None}, "max_alibi_bias is missing"),
        ("mpt odd", {"attention.clamp_kqv": -1.0}, "clip_qkv is -1.0"),
        ("bloom", {"attention.head_count": 7}, "has shape|divis"),
        ("gemma4", {"attention.shared_kv_layers": 6}, "shared_kv_layers is 6"),
        ("gemma4", {"attention.shared_kv_layers": 5}, "no earlier layer of type full_attention"),
        ("gemma4", {"attention.shared_kv_layers": 4}, "layers.2.mlp|layers.5|no earlier"),
        ("gemma4", {"embedding_length_per_layer_input": 11}, "embed_tokens_per_layer.* has shape"),
        ("gemma4", {"feed_forward_length": [80] * 5}, "a list of 6 integers"),
        ("gemma4", {"attention.key_length_swa": 12}, "rotate in part|has shape"),
        ("gemma4", {"rope.dimension_count_swa": 4}, "rotate in part"),
    ],
)
def test_invalid_metadata_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case = CASES[name]
    path = converted(original(case), case, tmp_path / "tiny.gguf", **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
