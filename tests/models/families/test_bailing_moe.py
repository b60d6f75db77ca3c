"""Ling, Ring and Sarvam, as published: GLM-4.5 and Granite of `transformers` under their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode.errors import CheckpointError
from anydecode.models.loading import load_checkpoint
from gguf_models import finish, interleave, usual_metadata, writer_with
from llama_cpp_logits import llama_cpp_logits
from tiny_models import BASE, built, chain, greedy, hf_logits, hf_model, logits

PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42]
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
#: The classes of `transformers`, their settings, and the class and keys of Ling.
VERSIONS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "first": (
        "GraniteMoeShared",
        {
            "intermediate_size": 24,
            "attention_multiplier": 12**-0.5,
            "shared_intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": ROPE,
        },
        "BailingMoeForCausalLM",
        {"num_shared_experts": 2, "moe_intermediate_size": 24},
    ),
    "second": (
        "Glm4Moe",
        {
            "head_dim": 12,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        "BailingMoeV2ForCausalLM",
        {
            "num_shared_experts": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        },
    ),
}
VERSIONS["sarvam"] = (
    "Glm4Moe",
    {
        **VERSIONS["second"][1],
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
    },
    "SarvamMoEForCausalLM",
    {
        "model_type": "sarvam_moe",
        "num_shared_experts": 1,
        "moe_intermediate_size": 24,
        "norm_topk_prob": None,  # as the keys that are left out, it has a default
    },
)
NAMES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
    "block_sparse_moe.router.layer": "mlp.gate",
    "block_sparse_moe.router": "mlp.gate",
    "block_sparse_moe.experts": "mlp.experts",
}
PARTS = ("gate", "up", "down")


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """The tensors of a model under the names of Ling, with one module per expert."""
    found: dict[str, np.ndarray] = {}
    for name, parameter in model.state_dict().items():
        tensor = parameter.numpy()
        for usual, other in NAMES.items():
            name = name.replace(usual, other)
        start, _, part = name.rpartition(".experts.")
        if start and part == "gate_up_proj":
            for expert, stack in enumerate(tensor):
                for kind, half in zip(PARTS, np.split(stack, 2), strict=False):
                    found[f"{start}.experts.{expert}.{kind}_proj.weight"] = half
        elif start:
            for expert, matrix in enumerate(tensor):
                found[f"{start}.experts.{expert}.down_proj.weight"] = matrix
        elif "shared_mlp.input_linear" in name:
            for kind, half in zip(PARTS, np.split(tensor, 2), strict=False):
                layer = name.partition(".shared_mlp")[0]
                found[f"{layer}.mlp.shared_experts.{kind}_proj.weight"] = half
        elif "shared_mlp.output_linear" in name:
            layer = name.partition(".shared_mlp")[0]
            found[f"{layer}.mlp.shared_experts.down_proj.weight"] = tensor
        else:
            found[name] = tensor
    for name in [name for name in found if "q_proj" in name]:
        parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        found[name.replace("self_attn.q_proj", "attention.query_key_value")] = np.concatenate(parts)
    return {name: np.ascontiguousarray(tensor) for name, tensor in found.items()}


def original(version: str) -> Any:
    family, settings, _, _ = VERSIONS[version]
    return hf_model(family, **settings)


def write(folder: Path, version: str, model: Any, **changes: Any) -> Path:
    _, settings, architecture, keys = VERSIONS[version]
    config = {
        **{key: value for key, value in BASE.items() if key != "initializer_range"},
        "model_type": "bailing_moe",
        "architectures": [architecture],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 12,
        "rope_theta": 500.0,
        "norm_topk_prob": True,
        "rms_norm_eps": model.config.rms_norm_eps,
        **keys,
    }
    save_file(tensors_of(model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_logits_and_greedy_tokens_match(version: str, tmp_path: Path) -> None:
    theirs = original(version)
    ours = built(load_checkpoint(write(tmp_path, version, theirs)), "float32")
    tokens = greedy(ours, PROMPT, 64)
    assert len(set(tokens)) > 2
    whole = PROMPT + tokens
    expected = hf_logits(theirs, whole)
    assert expected[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens
    assert np.abs(logits(ours, chain(whole)) - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("version", "change"),
    [
        ("first", {"norm_topk_prob": False}),
        ("second", {"n_group": 2}),
        ("second", {"routed_scaling_factor": 1.0}),
        ("second", {"partial_rotary_factor": 1.0}),
        ("second", {"moe_router_enable_expert_bias": False}),
        ("sarvam", {"moe_router_enable_expert_bias": False}),
        ("sarvam", {"use_qk_norm": False}),
    ],
)
def test_a_wrong_key_changes_the_logits(
    version: str, change: dict[str, Any], tmp_path: Path
) -> None:
    theirs = original(version)
    wrong = built(load_checkpoint(write(tmp_path, version, theirs, **change)), "float32")
    assert np.abs(logits(wrong, chain(PROMPT)) - hf_logits(theirs, PROMPT)).max() > 1e-2


@pytest.mark.parametrize(
    ("version", "change", "message"),
    [
        ("first", {"norm_head": True}, "norm_head=true is not supported in a bailing_moe config"),
        ("second", {"use_qkv_bias": True}, "use_qkv_bias=true is not supported"),
        ("second", {"score_function": "softmax"}, "score_function is 'softmax'"),
        ("second", {"architectures": ["BailingMoeV3ForCausalLM"]}, "BailingMoeV3ForCausalLM"),
    ],
)
def test_bad_configs_end_in_one_line(
    version: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        built(load_checkpoint(write(tmp_path, version, original(version), **change)))
    assert "\n" not in str(caught.value)


def as_gguf(path: Path, model: Any, **changes: Any) -> Path:
    """The second version as llama.cpp's converter writes it."""
    config = model.config.to_dict()
    metadata: dict[str, Any] = {
        **usual_metadata(config, 3),
        "rope.freq_base": 500.0,
        "rope.dimension_count": 6,
        "leading_dense_block_count": 1,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 24,
        "expert_shared_feed_forward_length": 24,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "nextn_predict_layers": 0,
    }
    writer = writer_with(path, "bailingmoe2", {**metadata, **changes}, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BAILINGMOE2, 3)
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors_of(model).items():
        if ".experts." in name:
            block, _, rest = name.partition(".experts.")
            stacks.setdefault(f"{block}.experts.{rest.split('.')[1]}.weight", []).append(tensor)
        elif name.endswith("expert_bias"):
            target = names.get_name(name)
            assert target is not None, name
            writer.add_tensor(f"{target}.bias", tensor)
        else:
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert target is not None, name
            writer.add_tensor(target, tensor)
    for name, matrices in stacks.items():
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None, name
        writer.add_tensor(target, np.stack(matrices))
    finish(writer)
    return path


def test_logits_of_a_gguf_file(tmp_path: Path) -> None:
    model = original("second")
    found = logits(built(load_checkpoint(as_gguf(tmp_path / "a.gguf", model))), chain(PROMPT))
    assert np.abs(found - hf_logits(model, PROMPT)).max() < 1e-4
    changed = as_gguf(tmp_path / "b.gguf", model, expert_group_count=2)
    found = logits(built(load_checkpoint(changed)), chain(PROMPT))
    assert np.abs(found - hf_logits(model, PROMPT)).max() > 1e-2


def first_as_gguf(path: Path, model: Any) -> Path:
    """The first version: queries, keys and values apart, with rows for interleaved pairs."""
    config = model.config.to_dict()
    metadata: dict[str, Any] = {
        **usual_metadata(config, 3),
        "rope.freq_base": 500.0,
        "rope.dimension_count": 12,
        "feed_forward_length": 80,
        "leading_dense_block_count": 0,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_shared_count": 2,
        "expert_feed_forward_length": 24,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
    }
    writer = writer_with(path, "bailingmoe", metadata, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BAILINGMOE, 3)
    stacks: dict[str, list[np.ndarray]] = {}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, tensor in tensors_of(model).items():
        layer = name.removeprefix("model.layers.").partition(".")[0]
        if ".experts." in name:
            block, _, rest = name.partition(".experts.")
            stacks.setdefault(f"{block}.experts.{rest.split('.')[1]}.weight", []).append(tensor)
        elif "query_key_value" in name:
            ends = 12 * heads, 12 * (heads + kv_heads)
            q, k, v = np.split(tensor, ends)
            writer.add_tensor(f"blk.{layer}.attn_q.weight", interleave(q, heads))
            writer.add_tensor(f"blk.{layer}.attn_k.weight", interleave(k, kv_heads))
            writer.add_tensor(f"blk.{layer}.attn_v.weight", v)
        elif name.endswith("attention.dense.weight"):
            writer.add_tensor(f"blk.{layer}.attn_output.weight", tensor)
        else:
            target = names.get_name(name, try_suffixes=(".weight",))
            assert target is not None, name
            writer.add_tensor(target, tensor)
    for name, matrices in stacks.items():
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None, name
        writer.add_tensor(target, np.stack(matrices))
    finish(writer)
    return path


def test_logits_of_a_gguf_file_of_the_first_version(tmp_path: Path) -> None:
    model = original("first")
    path = first_as_gguf(tmp_path / "tiny.gguf", model)
    found = logits(built(load_checkpoint(path)), chain(PROMPT))
    assert np.abs(found - hf_logits(model, PROMPT)).max() < 1e-4


def test_logits_of_the_first_version_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    path = first_as_gguf(tmp_path / "tiny.gguf", original("first"))
    found = logits(built(load_checkpoint(path)), chain(PROMPT))
    assert np.abs(found - llama_cpp_logits(path, PROMPT)).max() < 1e-4


def test_logits_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    path = as_gguf(tmp_path / "tiny.gguf", original("second"))
    found = logits(built(load_checkpoint(path)), chain(PROMPT))
    assert np.abs(found - llama_cpp_logits(path, PROMPT)).max() < 1e-4
