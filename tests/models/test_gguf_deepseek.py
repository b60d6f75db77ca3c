"""DeepSeek in GGUF, with the names and metadata of llama.cpp's converter, before and after it split
the matrix of keys and values by head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize, quantize
from anydecode.models.families import spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.gguf_config import config_from_gguf
from anydecode.models.loading.gguf_file import GGUFFile
from gguf_models import finish, named_tensors, start_writer
from llama_cpp_logits import llama_cpp_logits
from tiny_models import LATENT_SIZES, built, chain, hf_logits, hf_model, logits, own_model

TOKENS = [(7 * i + 4) % 131 for i in range(40)]
SETTINGS: dict[str, Any] = {
    **LATENT_SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
#: name -> (classes of `transformers`, settings, whether the file has the heads' matrices)
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "v3": ("DeepseekV3", SETTINGS, True),
    "v3 of old files": ("DeepseekV3", SETTINGS, False),
    "v2": ("DeepseekV2", {**SETTINGS, "topk_method": "group_limited_greedy"}, True),
    "v2 lite": (
        "DeepseekV2",
        {**SETTINGS, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
        False,
    ),
}
CASES["mistral4"] = (
    "Mistral4",
    {
        **{key: value for key, value in SETTINGS.items() if key != "n_group"},
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {
            **SETTINGS["rope_parameters"],
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    True,
)
CASES["minicpm3"] = (
    "MiniCPM3",
    {
        **LATENT_SIZES,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    False,
)
INDEXER = {"index_topk": 16, "index_n_heads": 8, "index_head_dim": 128}
CASES["deepseek32"] = (
    "DeepseekV32",
    {
        **SETTINGS,
        **INDEXER,
        "rope_parameters": {
            **SETTINGS["rope_parameters"],
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    True,
)
CASES["glm-dsa"] = (
    "GlmMoeDsa",
    {
        **{key: value for key, value in SETTINGS.items() if key != "rope_parameters"},
        **INDEXER,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    True,
)
#: The architectures of files that are not deepseek2.
ARCHITECTURES = {name: name for name in ("mistral4", "minicpm3", "deepseek32", "glm-dsa")}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}


def tensors_of(model: Any, has_heads: bool) -> dict[str, np.ndarray]:
    """The tensors of a model of `transformers`, by their names in the file."""
    config = model.config
    found, others = named_tensors(model)
    for block, rest, tensor in others:
        if rest.endswith("e_score_correction_bias"):
            found[f"{block}exp_probs_b.bias"] = tensor
        elif rest == "self_attn.kv_b_proj.weight" and has_heads:
            heads = tensor.reshape(config.num_attention_heads, -1, tensor.shape[-1])
            size = config.qk_nope_head_dim
            found[f"{block}attn_k_b.weight"] = heads[:, :size].swapaxes(1, 2)
            found[f"{block}attn_v_b.weight"] = heads[:, size:]
        else:
            module, leaf = rest.rsplit(".", 1)
            found[f"{block}{NAMES[module]}.{leaf}"] = tensor
    return found


def round_heads(model: Any, format: str, is_transposed: bool) -> None:
    """Round the matrices of keys and values to a format, keys along the axis that is stored."""
    import torch

    heads, size = model.config.num_attention_heads, model.config.qk_nope_head_dim
    for layer in model.model.layers:
        stored = layer.self_attn.kv_b_proj.weight.data
        parts = stored.numpy().reshape(heads, -1, stored.shape[-1]).copy()
        for head in parts:
            key = head[:size].T if is_transposed else head[:size]
            key = dequantize(quantize(np.ascontiguousarray(key), format))
            head[:size] = key.T if is_transposed else key
            head[size:] = dequantize(quantize(head[size:], format))
        stored.copy_(torch.from_numpy(parts).view(stored.shape))


def _experts(config: Any) -> dict[str, Any]:
    """The metadata of YaRN and of the experts."""
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_log_multiplier": 0.0707,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def write(path: Path, case: str, packed: str | None = None, **changes: Any) -> tuple[Path, Any]:
    """Write the file of a case; returns its path and the model of `transformers`.

    Args:
        path: The folder.
        case: A name of `CASES`.
        packed: The format of the matrices of keys and values; None for float32.
        changes: Tensors and metadata to replace; None: left out.
    """
    family, settings, has_heads = CASES[case]
    if packed:
        settings = {**settings, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    model = hf_model(family, **settings)
    if packed:
        round_heads(model, packed, has_heads)
    config = model.config
    key, rotary, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    sizes = {
        **{name: getattr(config, name) for name in ("vocab_size", "hidden_size")},
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": 1 if has_heads else config.num_attention_heads,
        "head_dim": rank + rotary if has_heads else key + rotary,
        "rms_norm_eps": config.rms_norm_eps,
    }
    file = path / "tiny.gguf"
    architecture = ARCHITECTURES.get(case, "deepseek2")
    writer = start_writer(file, architecture, sizes)
    writer.kv_data[0].pop(f"{architecture}.attention.value_length")
    metadata: dict[str, Any] = {
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "rope.dimension_count": rotary,
    }
    if case != "minicpm3":
        metadata |= _experts(config)
        metadata["attention.value_length"] = rank if has_heads else config.v_head_dim
    if has_heads:
        metadata["attention.key_length_mla"] = key + rotary
        metadata["attention.value_length_mla"] = config.v_head_dim
    if family == "Mistral4":
        metadata |= {"attention.temperature_scale": 0.3, "attention.temperature_length": 16}
        metadata |= {"expert_weights_norm": True, "rope.scaling.yarn_log_multiplier": 0.1}
    if architecture == "deepseek32":
        metadata["rope.scaling.yarn_log_multiplier"] = 0.1
    if architecture == "glm-dsa":
        metadata = {key: x for key, x in metadata.items() if not key.startswith("rope.scaling")}
    if architecture in ("deepseek32", "glm-dsa"):
        metadata |= {
            "attention.indexer.head_count": config.index_n_heads,
            "attention.indexer.key_length": config.index_head_dim,
            "attention.indexer.top_k": config.index_topk,
        }
    if family in ("DeepseekV3", "DeepseekV32", "GlmMoeDsa"):
        metadata["expert_gating_func"] = int(gguf.ExpertGatingFuncType.SIGMOID)
        metadata["expert_weights_norm"] = config.norm_topk_prob
    tensors = tensors_of(model, has_heads)
    for name, value in changes.items():
        target = tensors if name.startswith("blk.") else metadata
        target[name] = value
    for name, value in metadata.items():
        if value is None:
            continue
        full = f"{architecture}.{name}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(full, value)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        data = np.ascontiguousarray(tensor)
        if packed and name.endswith(("_k_b.weight", "_v_b.weight", "_kv_b.weight")):
            blocks = quantize(data.reshape(-1, data.shape[-1]), packed).data
            data = blocks.reshape(*data.shape[:-1], -1)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[packed])
        else:
            writer.add_tensor(name, data)
    finish(writer)
    return file, model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_folder(case: str, tmp_path: Path) -> None:
    path, model = write(tmp_path, case)
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.array_equal(found, logits(own_model(model), chain(TOKENS)))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4


#: Why llama.cpp opens a file not at all, or as another model.
NOT_OF_LLAMA_CPP = {
    "v2": "it reads no groups of experts",
    "v2 lite": "it takes models of 26 and 27 layers for it",
}


@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_OF_LLAMA_CPP])
def test_logits_equal_those_of_llama_cpp(case: str, tmp_path: Path) -> None:
    path, _ = write(tmp_path, case)
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    margin = 2e-4 if case == "minicpm3" else 1e-4  # its logits are multiplied by 16/3 here
    assert np.abs(found - llama_cpp_logits(path, TOKENS)).max() < margin


@pytest.mark.parametrize("case", ["v3", "v3 of old files"])
def test_packed_matrices_of_keys_and_values(case: str, tmp_path: Path) -> None:
    """Matrices by head stay packed. Where the key part has to be transposed, it becomes float16."""
    path, model = write(tmp_path, case, "Q8_0")
    found = built(load_checkpoint(path))
    latent = found.network.weights.layers[0].latent
    assert latent.values[0].format == "Q8_0"
    assert latent.keys[0].format == ("Q8_0" if case == "v3" else "F16")
    margin = 1e-4 if case == "v3" else 0.1
    assert np.abs(logits(found, chain(TOKENS)) - hf_logits(model, TOKENS)).max() < margin


def test_groups_that_old_files_do_not_store(tmp_path: Path) -> None:
    removed = {"expert_group_count": None, "expert_group_used_count": None}
    for case, count, groups in (("v3", 8, (1, 1)), ("v3", 256, (8, 4)), ("v2", 160, (8, 3))):
        path, _ = write(tmp_path, case, **removed, expert_count=count)
        config = config_from_gguf(GGUFFile(path))
        assert (config["n_group"], config["topk_group"]) == groups


def test_scores_without_a_gating_function(tmp_path: Path) -> None:
    """Files without the key are of V2, unless they have selection biases."""
    path, _ = write(tmp_path, "v3", expert_gating_func=None)
    assert load_checkpoint(path).config["model_type"] == "deepseek_v3"
    path, _ = write(tmp_path, "v2")
    assert load_checkpoint(path).config["model_type"] == "deepseek_v2"


def test_the_heads_of_files_with_both_layouts(tmp_path: Path) -> None:
    """Some files have the fused matrix, and further ones in a layout of their own."""
    extra = {f"blk.{i}.attn_k_b.weight": np.zeros((80, 10), np.float32) for i in range(3)}
    path, model = write(tmp_path, "v3 of old files", **extra)
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.array_equal(found, logits(own_model(model), chain(TOKENS)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.1.attn_v_b.weight": None}, "v_b_proj.0.weight' is missing"),
        ({"blk.1.attn_kv_a_norm.weight": None}, "kv_a_layernorm.weight' is missing"),
        ({"blk.2.exp_probs_b.bias": None}, "e_score_correction_bias' is missing"),
        ({"blk.0.attn_k_b.weight": np.zeros((3, 20, 10), np.float32)}, "matrices of 4 heads"),
        ({"blk.0.attn_k_b.weight": np.zeros((4, 19, 10), np.float32)}, "its metadata imply"),
        ({"attention.key_length_mla": 8}, "8 are rotary; allowed is more"),
        ({"attention.kv_lora_rank": None}, "attention.kv_lora_rank is missing"),
        ({"attention.q_lora_rank": None}, "attention.q_lora_rank is missing"),
        ({"expert_gating_func": 7}, "expert_gating_func is 7; allowed is 1 or 2"),
        ({"expert_group_count": 3}, "num_groups is 3; allowed is a divisor of the 8 experts"),
        ({"rope.dimension_count": 7}, "the rotary size is 7"),
        ({"expert_gating_func": 1}, "norm_topk_prob is True; allowed is false for deepseek_v2"),
    ],
)
def test_malformed_files_end_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, "v3", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        spec_from_config(load_checkpoint(path).config)
    assert "\n" not in str(caught.value)
