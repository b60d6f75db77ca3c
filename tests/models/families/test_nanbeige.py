"""Nanbeige: layers that run several times, against a Llama of `transformers` that does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families import load_network, spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import finish, interleave, tensor_names, usual_metadata, write_folder, writer_with
from llama_cpp_logits import llama_cpp_logits
from nanbeige_models import as_nanbeige, forward, nanbeige_checkpoint, nanbeige_llama
from tiny_models import built, chain, greedy, logits

TEXT = [(7 * i + 3) % 131 for i in range(24)]
BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]
#: The settings: how often the layers run, and whether their output is normed in between.
CASES = [(2, True), (3, True), (2, False)]


def config_of(loops: int, has_norms: bool) -> dict[str, Any]:
    return {"num_loops": loops, "skip_loop_final_norm": not has_norms}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("loops", "has_norms"), CASES)
def test_logits_and_greedy_tokens_match_those_of_llama(
    backend: str, loops: int, has_norms: bool
) -> None:
    model = nanbeige_llama()
    checkpoint = as_nanbeige(model, **config_of(loops, has_norms))
    own = built(checkpoint, executor=choose_executor(backend, threads=1))
    tokens = greedy(own, TEXT, 64)
    assert len(set(tokens)) > 2, "a model that repeats itself proves little"
    expected = forward(model, TEXT + tokens, loops, has_norms)
    assert expected[len(TEXT) - 1 : -1].argmax(-1).tolist() == tokens
    assert np.abs(logits(own, chain(TEXT + tokens)) - expected).max() < 1e-4


def test_runs_and_norms_in_between_count() -> None:
    """Wrong twins: another number of runs, and no norms."""
    model = nanbeige_llama()
    found = logits(built(as_nanbeige(model)), chain(TEXT))
    for twin in (forward(model, TEXT, 3), forward(model, TEXT, 2, has_norms=False)):
        assert np.abs(found - twin).max() > 1e-2


def test_layers_that_run_again_have_the_same_matrices() -> None:
    network = load_network(nanbeige_checkpoint())
    first, second, *again = network.weights.layers
    assert again == [first, second]
    assert [layer.ends_loop for layer in network.spec.layers] == [False, True, False, False]


def test_a_folder_opens(tmp_path: Path) -> None:
    checkpoint = nanbeige_checkpoint()
    folder = write_folder(tmp_path, dict(checkpoint.tensors), **checkpoint.config)
    found = logits(built(load_checkpoint(folder)), chain(TEXT))
    assert np.array_equal(found, logits(built(checkpoint), chain(TEXT)))


def as_gguf(model: Any, path: Path, loops: int, has_norms: bool) -> Path:
    """The file that llama.cpp's converter makes of the model."""
    config = model.config.to_dict()
    metadata = {
        **usual_metadata(config, 2),
        "rope.dimension_count": 16,
        "rope.freq_base": 10_000.0,
        "num_loops": loops,
        "skip_loop_final_norm": not has_norms,
    }
    writer = writer_with(path, "nanbeige", metadata, config["vocab_size"])
    names = tensor_names("llama", 2)
    for name, tensor in model.state_dict().items():
        stored = tensor.numpy()
        for kind, heads in (("q_proj", 4), ("k_proj", 2)):
            stored = interleave(stored, heads) if f".{kind}." in name else stored
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), stored)
    finish(writer)
    return path


@pytest.mark.parametrize(("loops", "has_norms"), CASES)
def test_logits_of_a_gguf_file(loops: int, has_norms: bool, tmp_path: Path) -> None:
    model = nanbeige_llama()
    path = as_gguf(model, tmp_path / "tiny.gguf", loops, has_norms)
    found = logits(built(load_checkpoint(path)), chain(TEXT))
    assert np.abs(found - forward(model, TEXT, loops, has_norms)).max() < 1e-4


@pytest.mark.parametrize(("loops", "has_norms"), CASES)
def test_logits_equal_those_of_llama_cpp(loops: int, has_norms: bool, tmp_path: Path) -> None:
    path = as_gguf(nanbeige_llama(), tmp_path / "tiny.gguf", loops, has_norms)
    found = logits(built(load_checkpoint(path)), chain(TEXT))
    assert np.abs(found - llama_cpp_logits(path, TEXT)).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_mhc": True}, "enable_mhc is True; allowed is unset"),
        ({"loop_share_kv": True}, "loop_share_kv is True; allowed is unset"),
        ({"num_loops": 0}, "num_loops is 0"),
        ({"num_loops": 1 << 20}, "num_loops is 1048576"),
    ],
)
def test_other_options_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        spec_from_config(nanbeige_checkpoint(**change).config)
    assert "\n" not in str(caught.value)
