"""EmbeddingGemma as published: Gemma 3 whose rows attend to both sides, and dense modules behind
the pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode import LLM
from anydecode.errors import CheckpointError
from encoder_models import declare_pooling, hf_encoder, hf_states, save_encoder

TOKENS = [int(token) for token in np.random.default_rng(0).integers(5, 57, 50)]
SETTINGS: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 20,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "use_bidirectional_attention": True,
}
KINDS = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]


def dense(folder: Path, outputs: int, inputs: int, activation: str, *, bias: bool) -> np.ndarray:
    """Write a dense module, and return its weight and its bias in the last column."""
    random = np.random.default_rng(outputs)
    tensors = {"linear.weight": random.standard_normal((outputs, inputs), np.float32) / 7}
    if bias:
        tensors["linear.bias"] = random.standard_normal(outputs, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    name = (
        f"torch.nn.modules.{'linear.Identity' if activation == 'Identity' else 'activation.Tanh'}"
    )
    (folder / "config.json").write_text(json.dumps({"activation_function": name}))
    last = tensors.get("linear.bias", np.zeros(outputs, np.float32))
    return np.concatenate([tensors["linear.weight"], last[:, None]], 1)


def saved(folder: Path, model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Write the model with two dense modules, and return these."""
    declare_pooling(save_encoder(model, folder), "mean_tokens")
    listed = [
        {"idx": index, "path": f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(KINDS)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    first = dense(folder / "2_Dense", 80, 48, "Identity", bias=False)
    return first, dense(folder / "3_Dense", 48, 80, "Tanh", bias=True)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_states_equal_those_of_transformers(backend: str, tmp_path: Path) -> None:
    """A window of other size on either side, or rows that see one side, would differ."""
    model = hf_encoder("Gemma3Text", **SETTINGS)
    declare_pooling(save_encoder(model, tmp_path), "lasttoken", is_normalized=False)
    with LLM(tmp_path, backend=backend, threads=1) as llm:
        for count in (50, 20, 7, 1):
            expected = hf_states(model, TOKENS[:count])[-1]
            assert np.abs(np.array(llm.embed(TOKENS[:count])) - expected).max() < 1e-4
    causal = hf_encoder("Gemma3Text", **{**SETTINGS, "use_bidirectional_attention": False})
    assert np.abs(hf_states(causal, TOKENS)[-1] - hf_states(model, TOKENS)[-1]).max() > 1e-2


def test_the_base_of_layers_with_windows_is_a_key_of_published_configs(tmp_path: Path) -> None:
    """Configs without `rope_parameters` have the bases of the two types of layers as two keys."""
    bases = {"full_attention": 5000.0, "sliding_attention": 7.0}
    ropes = {kind: {"rope_type": "default", "rope_theta": x} for kind, x in bases.items()}
    model = hf_encoder("Gemma3Text", **SETTINGS, rope_parameters=ropes)
    older = {"rope_parameters": None, "rope_theta": 5000.0, "rope_local_base_freq": 7.0}
    declare_pooling(save_encoder(model, tmp_path, **older), "lasttoken", is_normalized=False)
    with LLM(tmp_path, threads=1) as llm:
        found = np.array(llm.embed(TOKENS))
    assert np.abs(found - hf_states(model, TOKENS)[-1]).max() < 1e-4


def test_dense_modules_follow_the_pooling(tmp_path: Path) -> None:
    model = hf_encoder("Gemma3Text", **SETTINGS)
    first, second = saved(tmp_path, model)
    mean = hf_states(model, TOKENS).mean(0)
    inner = first[:, :-1] @ mean + first[:, -1]
    expected = np.tanh(second[:, :-1] @ inner + second[:, -1])
    expected = expected / np.linalg.norm(expected)
    with LLM(tmp_path, threads=1) as llm:
        found = np.array(llm.embed(TOKENS))
    assert np.abs(found - expected).max() < 1e-4
    assert np.abs(found - mean / np.linalg.norm(mean)).max() > 1e-2


def test_invalid_dense_modules_end_in_one_line(tmp_path: Path) -> None:
    saved(tmp_path, hf_encoder("Gemma3Text", **SETTINGS))
    path = tmp_path / "3_Dense" / "config.json"
    path.write_text(json.dumps({"activation_function": "torch.nn.GELU"}))
    with pytest.raises(CheckpointError, match="activation 'GELU'; supported are Identity, Tanh"):
        LLM(tmp_path)
    path.write_text(json.dumps({"activation_function": "torch.nn.Tanh"}))
    weights = tmp_path / "3_Dense" / "model.safetensors"
    save_file({"linear.weight": np.zeros((48, 7), np.float32)}, weights)
    with pytest.raises(CheckpointError, match="linear.weight is no matrix of 80 inputs"):
        LLM(tmp_path)
    save_file({"linear.weight": np.zeros((47, 80), np.float32)}, weights)
    with pytest.raises(CheckpointError, match="dense modules with 47 outputs; allowed are 48"):
        LLM(tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        LLM(tmp_path)
