"""Kimi K3 against a forward pass in numpy and against llama.cpp, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families import spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer
from gguf_models import write_folder
from kimi_k3_models import (
    CONFIG,
    KimiK3,
    kimi_k3_checkpoint,
    kimi_k3_gguf,
    kimi_k3_module,
    kimi_k3_tensors,
)
from llama_cpp_logits import llama_cpp_logits
from mtp_models import assert_module_drafts
from tiny_models import built, chain, greedy, logits

TEXT = [(7 * i + 3) % 131 for i in range(24)]
BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]
LINEAR = CONFIG["linear_attn_config"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_match_a_forward_pass(backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    own = built(kimi_k3_checkpoint(), executor=choose_executor(backend, threads=1))
    tokens = greedy(own, TEXT, 64)
    assert len(set(tokens)) > 2, "a model that repeats itself proves little"
    expected = KimiK3(kimi_k3_tensors()).forward(TEXT + tokens)
    assert expected[len(TEXT) - 1 : -1].argmax(-1).tolist() == tokens
    assert np.abs(logits(own, chain(TEXT + tokens)) - expected).max() < 1e-4


#: Parts of the reference in which a wrong twin differs.
TWINS: dict[str, dict[str, Any]] = {
    "blocks of other sizes": {"block": 3},
    "one block": {"block": 5},
    "another limit of decays": {"decay_limit": -5.0},
    "no gate of attention": {"gates_attention": False},
    "no norm of experts": {"norms_experts": False},
    "other limits of activations": {"caps": (3.0, 2.0)},
    "sums of normed streams": {"normed_sums": True},
}


@pytest.mark.parametrize("twin", TWINS)
def test_wrong_twins_have_other_logits(twin: str) -> None:
    found = logits(built(kimi_k3_checkpoint()), chain(TEXT))
    other = replace(KimiK3(kimi_k3_tensors()), **TWINS[twin])
    assert np.abs(found - other.forward(TEXT)).max() > 1e-2


#: Changes of the config, and of the reference.
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"attn_res_block_size": 3}, {"block": 3}),
    ({"attn_res_block_size": 1}, {"block": 1}),
    ({"mla_use_output_gate": False}, {"gates_attention": False}),
    ({"latent_moe_use_norm": False}, {"norms_experts": False}),
    ({"activation_situ_beta": 5.0}, {"caps": (5.0, 3.0)}),
    ({"activation_situ_linear_beta": None}, {"caps": (2.0, 1e9)}),
    ({"linear_attn_config": {**LINEAR, "gate_lower_bound": -1.0}}, {"decay_limit": -1.0}),
]


@pytest.mark.parametrize(("change", "own"), SETTINGS)
def test_odd_settings(change: dict[str, Any], own: dict[str, Any]) -> None:
    expected = replace(KimiK3(kimi_k3_tensors()), **own).forward(TEXT)
    for backend in BACKENDS:
        model = built(kimi_k3_checkpoint(**change), executor=choose_executor(backend, threads=1))
        assert np.abs(logits(model, chain(TEXT)) - expected).max() < 1e-4


def test_the_published_folder_opens(tmp_path: Path) -> None:
    """Its language model is a part, whose model type is that of Kimi Linear."""
    config = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"}
    tensors = {**kimi_k3_tensors(), "vision_tower.x.weight": np.zeros((2, 2), np.float32)}
    folder = write_folder(tmp_path, tensors, **config, text_config=CONFIG, vision_config={})
    found = logits(built(load_checkpoint(folder)), chain(TEXT))
    assert np.array_equal(found, logits(built(kimi_k3_checkpoint()), chain(TEXT)))


@pytest.mark.parametrize("place", ["in the model's folder", "alone"])
def test_the_module_drafts_as_a_forward_pass_does(tmp_path: Path, place: str) -> None:
    """It reads the state before the final norm, its layer no sums over blocks. A folder with the
    module alone is a draft model."""
    config = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"}
    config |= {"text_config": {**CONFIG, "num_nextn_predict_layers": 1}, "vision_config": {}}
    model, module = kimi_k3_tensors(), kimi_k3_module()
    (tmp_path / "draft").mkdir()
    draft, stored = None, {**model, **module}
    if place == "alone":
        draft, stored = write_folder(tmp_path / "draft", module, **config), model
    folder = write_folder(tmp_path, stored, **config)
    with LLM(folder, draft=draft, tokenizer=ByteTokenizer()) as llm:
        assert_module_drafts(llm, TEXT, KimiK3({**model, **module}).chain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gguf_file(backend: str, tmp_path: Path) -> None:
    path = kimi_k3_gguf(tmp_path / "tiny.gguf", kimi_k3_tensors())
    own = built(load_checkpoint(path), executor=choose_executor(backend, threads=1))
    expected = KimiK3(kimi_k3_tensors()).forward(TEXT)
    assert np.abs(logits(own, chain(TEXT)) - expected).max() < 1e-4


def test_the_logits_of_llama_cpp(tmp_path: Path) -> None:
    """All its norms have the epsilon of the config."""
    eps = {"attention.layer_norm_rms_epsilon": 1e-6}
    path = kimi_k3_gguf(tmp_path / "tiny.gguf", kimi_k3_tensors(), **eps)
    expected = llama_cpp_logits(path, TEXT)
    found = logits(built(load_checkpoint(path)), chain(TEXT))
    assert np.abs(found - expected).max() < 5e-4


@pytest.mark.parametrize(
    "change",
    [
        {"attn_res.block_size": 3},
        {"activation.situ_beta": 3.0},
        {"activation.situ_linear_beta": 0.0},
        {"kda.gate_lower_bound": None},
        {"expert_weights_scale": 1.0},
        {"attention.layer_norm_rms_epsilon": 0.1},
    ],
)
def test_every_key_of_a_file_changes_the_logits(change: dict[str, Any], tmp_path: Path) -> None:
    path = kimi_k3_gguf(tmp_path / "tiny.gguf", kimi_k3_tensors(), **change)
    found = logits(built(load_checkpoint(path)), chain(TEXT))
    assert np.abs(found - KimiK3(kimi_k3_tensors()).forward(TEXT)).max() > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_res_block_size": 0}, "attn_res_block_size is 0"),
        (
            {"num_hidden_layers": 65, "attn_res_block_size": 1},
            "num_streams is 66; allowed",
        ),
        ({"hidden_act": "siglu"}, "activation 'siglu' is not supported"),
        ({"activation_situ_beta": 0.0}, "activation_situ_beta is 0.0"),
        ({"activation_situ_linear_beta": -1.0}, "activation_situ_linear_beta is -1.0"),
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"moe_router_activation_func": "softmax"}, "is 'softmax'; allowed is 'sigmoid'"),
        ({"linear_attn_config": {**LINEAR, "gate_lower_bound": 1.0}}, "kda_lower_bound is 1.0"),
    ],
)
def test_other_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        spec_from_config({**CONFIG, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_res.block_size": None}, "attn_res.block_size is missing"),
        ({"attn_res.block_size": 0}, "attn_res.block_size is 0"),
        ({"activation.situ_linear_beta": None}, "situ_linear_beta is missing"),
        ({"expert_latent_length": 20}, "has shape"),
        ({"kda.head_dim": 12}, "has shape"),
        ({"attention.head_count_kv": [0, 1, 0, 0, 1]}, "is missing"),
    ],
)
def test_other_files_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = kimi_k3_gguf(tmp_path / "tiny.gguf", kimi_k3_tensors(), **change)
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value)
