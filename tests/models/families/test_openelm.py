"""OpenELM: layers of different sizes, against a forward pass in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families import spec_from_config
from anydecode.models.opening import choose_executor
from openelm_models import forward, openelm_checkpoint
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
