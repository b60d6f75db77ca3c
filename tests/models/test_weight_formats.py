"""Models whose weights are in a format of few bits, from the file to the logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from anydecode.benchmarks import shapes
from anydecode.kernels.formats import dequantize
from anydecode.kernels.grids import GRID_FORMATS
from anydecode.kernels.interface import Weight
from anydecode.kernels.library import load_library
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import SIZES, make_tensors, write_gguf
from tiny_models import built, chain, logits

FORMATS = ("NVFP4", "TQ1_0", "TQ2_0", *GRID_FORMATS)
TEXT = [(7 * i * i + 3) % 500 for i in range(40)]


@pytest.mark.parametrize("format", FORMATS)
def test_logits_are_those_of_the_dequantised_model(format: str, tmp_path: Path) -> None:
    """But for the rounding of activations to int8; passes of any size have the same bits."""
    if load_library() is None:
        pytest.skip("the native kernels are not available here")
    path = tmp_path / "m.gguf"
    shapes.write(path, shapes.SHAPES["tiny"], format)
    checkpoint = load_checkpoint(path)
    stored = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(stored, Weight) and stored.format == format
    model = built(checkpoint, executor=choose_executor("native"))
    dense = built(load_checkpoint(path), "float32", executor=choose_executor("native"))
    cache = model.new_cache(40)
    together = logits(model, chain(TEXT), model.new_cache(40))
    expected = logits(dense, chain(TEXT), dense.new_cache(40))
    error = np.linalg.norm(together - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.03
    parts = [(0, 25), (25, 39), (39, 40)]
    steps = [logits(model, chain(TEXT[a:b], a), cache) for a, b in parts]
    assert np.array_equal(np.concatenate(steps), together)


def one_bit_values(matrix: np.ndarray) -> np.ndarray:
    blocks = matrix.reshape(-1, 128)
    scale = np.abs(blocks).mean(1, keepdims=True).astype(np.float16).astype(np.float32)
    return np.where(blocks >= 0, scale, -scale).reshape(matrix.shape)


def two_bit_values(matrix: np.ndarray) -> np.ndarray:
    blocks = matrix.reshape(-1, 64)
    scale = (np.abs(blocks).max(1, keepdims=True) / 2).astype(np.float16).astype(np.float32)
    return (scale * np.clip(np.rint(blocks / scale), -1, 2)).reshape(matrix.shape)


@pytest.mark.parametrize(("format", "values"), [("Q1_0", one_bit_values), ("Q2_0", two_bit_values)])
def test_few_bits_become_four_without_loss(
    format: str, values: Callable[[np.ndarray], np.ndarray], tmp_path: Path
) -> None:
    """Rejects swapped signs, another order of the numbers of a byte, and scales of other blocks."""
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    random = np.random.default_rng(3)
    widths = {name: tensor.shape for name, tensor in make_tensors("llama").items()}
    larger = {64: 256, 32: 128, 96: 384, 40: 40}
    tensors = {
        name: random.standard_normal([larger[size] for size in shape]).astype(np.float32)
        for name, shape in widths.items()
    }
    write_gguf(tmp_path / "m.gguf", "llama", tensors, format, sizes)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = values(tensor)
    write_gguf(tmp_path / "dense.gguf", "llama", tensors, "F32", sizes)
    checkpoint, dense = (load_checkpoint(tmp_path / f"{name}.gguf") for name in ("m", "dense"))
    for name, tensor in dense.tensors.items():
        stored = checkpoint.tensors[name]
        if isinstance(stored, Weight):
            assert stored.format == "Q4_0"
            assert np.array_equal(dequantize(stored), tensor)
    found, expected = (
        logits(built(one), chain([token % 40 for token in TEXT])) for one in (checkpoint, dense)
    )
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)
