"""Ouro: layers that run several times, against a model of `transformers` that does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from anydecode.kernels.library import load_library
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import write_folder
from nanbeige_models import as_ouro, forward, ouro_base
from tiny_models import built, chain, greedy, logits

TEXT = [(7 * i + 3) % 131 for i in range(24)]
BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loops", [1, 3])
def test_logits_and_greedy_tokens_match(backend: str, loops: int) -> None:
    model = ouro_base()
    checkpoint = as_ouro(model, total_ut_steps=loops)
    own = built(checkpoint, executor=choose_executor(backend, threads=1))
    tokens = greedy(own, TEXT, 64)
    assert len(set(tokens)) > 2, "a model that repeats itself proves little"
    expected = forward(model, TEXT + tokens, loops)
    assert expected[len(TEXT) - 1 : -1].argmax(-1).tolist() == tokens
    assert np.abs(logits(own, chain(TEXT + tokens)) - expected).max() < 1e-4


def test_runs_and_norms_count() -> None:
    """Wrong twins: another number of runs, no norms between runs, and other norms."""
    model = ouro_base()
    found = logits(built(as_ouro(model)), chain(TEXT))
    for twin in (forward(model, TEXT, 2), forward(model, TEXT, 3, has_norms=False)):
        assert np.abs(found - twin).max() > 1e-2
    swapped = as_ouro(model)
    names = "input_layernorm_2", "post_attention_layernorm"
    for layer in range(2):
        first, second = (f"model.layers.{layer}.{name}.weight" for name in names)
        tensors = dict(swapped.tensors)
        swapped.tensors = {**tensors, first: tensors[second], second: tensors[first]}
    assert np.abs(logits(built(swapped), chain(TEXT)) - found).max() > 1e-2


def test_the_published_number_of_runs_is_the_default(tmp_path: Path) -> None:
    model = ouro_base()
    checkpoint = as_ouro(model)
    del checkpoint.config["total_ut_steps"]
    tensors = {**checkpoint.tensors, "model.early_exit_gate.weight": np.zeros((1, 48), np.float32)}
    folder = write_folder(tmp_path, tensors, **checkpoint.config)
    found = logits(built(load_checkpoint(folder)), chain(TEXT))
    assert np.abs(found - forward(model, TEXT, 4)).max() < 1e-4
