"""Baichuan 13B: linear biases of attention, against a forward pass in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.kernels.library import load_library
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from baichuan_models import baichuan_checkpoint, forward
from gguf_models import finish, interleave, tensor_names, usual_metadata, writer_with
from llama_cpp_logits import llama_cpp_logits
from tiny_models import built, chain, logits

TEXT = [5, 17, 99, 3, 64, 11, 42, 42, 7, 101, 5, 17]
BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [4, 6])
def test_logits_equal_those_of_another_forward_pass(backend: str, heads: int) -> None:
    """Six heads are no power of two."""
    if backend == "torch":
        pytest.importorskip("torch")
    checkpoint = baichuan_checkpoint(0, heads)
    found = logits(built(checkpoint, executor=choose_executor(backend, threads=1)), chain(TEXT))
    expected = forward(checkpoint, TEXT)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_slopes_of_a_power_of_two_are_found() -> None:
    """Wrong twin: the slopes of six heads are not 2^(-8 i / 6)."""
    checkpoint = baichuan_checkpoint(0, 6)
    found = logits(built(checkpoint), chain(TEXT))
    wrong = forward(checkpoint, TEXT, slopes=2.0 ** (-8 * np.arange(1, 7) / 6))
    assert np.abs(found - wrong).max() > 1e-3 * np.abs(wrong).max()


def as_gguf(path: Path, checkpoint: Any) -> Path:
    config = checkpoint.config
    metadata = {
        **usual_metadata(config, config["num_hidden_layers"]),
        "context_length": 256,
        "attention.head_count_kv": config["num_attention_heads"],
        "rope.dimension_count": 12,
    }
    writer = writer_with(path, "baichuan", metadata, config["vocab_size"])
    names = tensor_names("baichuan", config["num_hidden_layers"])
    for name, tensor in checkpoint.tensors.items():
        parts = {name: tensor}
        if "W_pack" in name:
            q, k, v = np.split(tensor, 3)
            heads = config["num_attention_heads"]
            q, k = interleave(q, heads), interleave(k, heads)
            parts = {
                name.replace("W_pack", f"{x}_proj"): y
                for x, y in zip("qkv", (q, k, v), strict=True)
            }
        for key, part in parts.items():
            target = names.get_name(key, try_suffixes=(".weight",))
            assert target is not None, key
            writer.add_tensor(target, np.ascontiguousarray(part))
    finish(writer)
    return path


def test_files_of_forty_layers_have_linear_biases(tmp_path: Path) -> None:
    checkpoint = baichuan_checkpoint(0, layers=40)
    found = logits(built(load_checkpoint(as_gguf(tmp_path / "a.gguf", checkpoint))), chain(TEXT))
    expected = forward(checkpoint, TEXT)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    fewer = baichuan_checkpoint(0, layers=3)
    found = logits(built(load_checkpoint(as_gguf(tmp_path / "b.gguf", fewer))), chain(TEXT))
    expected = forward(fewer, TEXT)
    assert np.abs(found - expected).max() > 1e-2 * np.abs(expected).max()


def test_logits_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    path = as_gguf(tmp_path / "tiny.gguf", baichuan_checkpoint(0, layers=40))
    expected = llama_cpp_logits(path, TEXT)
    found = logits(built(load_checkpoint(path)), chain(TEXT))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
