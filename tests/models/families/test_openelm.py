"""OpenELM: layers of different sizes, against a forward pass in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import finish, tensor_names, writer_with
from llama_cpp_logits import llama_cpp_logits
from openelm_models import HEAD, HIDDEN, SHAPES, forward, openelm_checkpoint
from tiny_models import built, chain, logits

TEXT = [5, 17, 99, 3, 64, 11, 42, 42, 7, 101, 5, 17]
BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("has_norms", "is_tied"), [(True, True), (False, False)])
def test_logits_equal_those_of_another_forward_pass(
    backend: str, has_norms: bool, is_tied: bool
) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    checkpoint = openelm_checkpoint(0, has_norms, is_tied)
    found = logits(built(checkpoint, executor=choose_executor(backend, threads=1)), chain(TEXT))
    expected = forward(checkpoint, TEXT)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_another_base_of_rotations_is_found() -> None:
    """Wrong twin."""
    checkpoint = openelm_checkpoint()
    found, wrong = logits(built(checkpoint), chain(TEXT)), forward(checkpoint, TEXT, base=1e4)
    assert np.abs(found - wrong).max() > 1e-3 * np.abs(wrong).max()


def test_the_published_sizes() -> None:
    """Those of the first and the last layer of OpenELM-270M."""
    config = {
        **openelm_checkpoint().config,
        "model_dim": 1280,
        "head_dim": 64,
        "ffn_dim_divisor": 256,
        "num_transformer_layers": 2,
        "ffn_multipliers": [0.5, 4.0],
        "num_query_heads": [12, 20],
        "num_kv_heads": [3, 5],
    }
    shapes = [layer.attention for layer in spec_from_config(config).layers]
    assert [(x.num_heads, x.num_kv_heads) for x in shapes if x is not None] == [(12, 3), (20, 5)]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_kv_heads", [1, 2], r"num_kv_heads is \[1, 2\]; allowed is a list of 3 numbers"),
        ("ffn_multipliers", None, "ffn_multipliers is None; allowed is a list of 3 numbers"),
        ("ffn_with_glu", False, "ffn_with_glu is False; allowed is true"),
        ("num_query_heads", [2, 0, 6], "num_query_heads"),
        ("ffn_multipliers", [0.5, float("inf"), 1.0], "ffn_multipliers"),
        ("ffn_dim_divisor", 0, "ffn_dim_divisor"),
    ],
)
def test_other_configs_are_refused(key: str, value: Any, message: str) -> None:
    checkpoint = openelm_checkpoint()
    checkpoint.config[key] = value
    with pytest.raises(CheckpointError, match=message):
        built(checkpoint)


def as_gguf(path: Path, checkpoint: Checkpoint, **changes: Any) -> Path:
    """The model as the converter of llama.cpp writes it: gate and up of MLPs are two tensors."""
    heads, kv_heads, inner = (list(sizes) for sizes in zip(*SHAPES, strict=True))
    metadata = {
        "block_count": len(SHAPES),
        "context_length": 2048,
        "embedding_length": HIDDEN,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 500.0,
        **changes,
    }
    writer = writer_with(path, "openelm", metadata, checkpoint.config["vocab_size"])
    names = tensor_names("openelm", len(SHAPES))
    for name, tensor in checkpoint.tensors.items():
        if "proj_1" in name:
            for part, half in zip(("gate", "up"), np.split(tensor, 2), strict=True):
                layer = name.split(".")[2]
                writer.add_tensor(f"blk.{layer}.ffn_{part}.weight", np.ascontiguousarray(half))
            continue
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None, name
        writer.add_tensor(target, tensor)
    finish(writer)
    return path


@pytest.mark.parametrize("has_norms", [True, False])
def test_gguf_files_equal_another_forward_pass(has_norms: bool, tmp_path: Path) -> None:
    checkpoint = openelm_checkpoint(0, has_norms)
    found = logits(built(load_checkpoint(as_gguf(tmp_path / "a.gguf", checkpoint))), chain(TEXT))
    expected = forward(checkpoint, TEXT)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    wrong = forward(checkpoint, TEXT, base=1e4)
    assert np.abs(found - wrong).max() > 1e-3 * np.abs(wrong).max()


def test_gguf_files_equal_llama_cpp(tmp_path: Path) -> None:
    path = as_gguf(tmp_path / "a.gguf", openelm_checkpoint())
    expected = llama_cpp_logits(path, TEXT)
    found = logits(built(load_checkpoint(path)), chain(TEXT))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count", [2, 4], "a list of 3 integers"),
        ("attention.head_count_kv", [1, 2, 0], "head_count_kv is 0"),
        ("feed_forward_length", [32, 48, 96], "its metadata imply"),
    ],
)
def test_other_metadata_are_refused(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = as_gguf(tmp_path / "a.gguf", openelm_checkpoint(), **{key: value})
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)
