"""Models whose weights are in a format of few bits, from the file to the logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from anydecode.benchmarks import shapes
from anydecode.kernels.grids import GRID_FORMATS
from anydecode.kernels.interface import Weight
from anydecode.kernels.library import load_library
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
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
