"""EmbeddingGemma 2: its text model alone and in a multimodal checkpoint, and its last matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from anydecode import LLM
from anydecode.errors import CheckpointError, InvalidRequestError
from encoder_models import add_letters, declare_pooling, hf_encoder, hf_states, save_encoder
from parity_cases import parity_module

TOKENS = [int(token) for token in np.random.default_rng(0).integers(5, 57, 50)]


def theirs(**changes: Any) -> Any:
    """The model of the parity test, with factors of layers."""
    family, settings = parity_module("test_encoders").CASES["embedding gemma 2"]
    model = hf_encoder(family, **{**settings, **changes})
    for number, layer in enumerate(model.layers):
        layer.layer_scalar.fill_(0.7 + 0.2 * number)
    return model


def mean(model: Any) -> np.ndarray:
    found = hf_states(model, TOKENS).mean(0)
    unit: np.ndarray = found / np.linalg.norm(found)
    return unit


def embedding(folder: Path, **options: Any) -> np.ndarray:
    with LLM(folder, threads=1) as llm:
        return np.array(llm.embed(TOKENS, **options))


def test_embeddings_have_the_size_of_the_projection(tmp_path: Path) -> None:
    """With the files of sentence-transformers and without. Wrong twins: another window, another
    base of rotations, no factors of layers, and the projection of other states."""
    model = theirs()
    folder = save_encoder(model, tmp_path)
    assert embedding(folder).shape == (40,)
    assert np.abs(embedding(folder) - mean(model)).max() < 1e-4
    declare_pooling(folder, "mean_tokens")
    assert np.abs(embedding(folder) - mean(model)).max() < 1e-4
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for changes in (
        {"sliding_window": 5},
        {"rope_parameters": {"full_attention": {"rope_theta": 3.0}}},
        {"hidden_activation": "silu"},
    ):
        path.write_text(json.dumps({**config, **changes}))
        assert np.abs(embedding(folder) - mean(model)).max() > 1e-3, changes
    path.write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in ("layers.1.layer_scalar", "embedding_projection.weight"):
        changed = {**tensors, name: np.flip(tensors[name], 0) * np.float32(2)}
        save_file({x: np.ascontiguousarray(y) for x, y in changed.items()}, tmp_path / "x")
        (tmp_path / "x").rename(folder / "model.safetensors")
        assert np.abs(embedding(folder) - mean(model)).max() > 1e-3, name


def test_the_text_model_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = theirs()
    whole = transformers.EmbeddingGemma2Model(
        transformers.EmbeddingGemma2Config(
            text_config=model.config.to_dict(), vision_config=None, audio_config=None
        )
    )
    whole.language_model.load_state_dict(model.state_dict())
    whole.save_pretrained(tmp_path)
    assert np.abs(embedding(add_letters(tmp_path)) - mean(model)).max() < 1e-4


def test_batches_equal_single_texts(tmp_path: Path) -> None:
    save_encoder(theirs(), tmp_path)
    texts = [TOKENS[start : start + size] for start, size in ((0, 1), (3, 20), (1, 45), (9, 33))]
    with LLM(tmp_path, threads=2, row_budget=64) as llm:
        assert llm.embed(texts) == [llm.embed(text) for text in texts]


def test_other_sizes_are_refused(tmp_path: Path) -> None:
    folder = save_encoder(theirs(), tmp_path)
    with pytest.raises(InvalidRequestError, match="dimensions is 48; .* embeddings have 40"):
        embedding(folder, dimensions=48)
    tensors = load_file(folder / "model.safetensors")
    name = "embedding_projection.weight"
    save_file({**tensors, name: np.zeros((40, 47), np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="allowed is a matrix of 48 inputs"):
        LLM(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="embedding_projection.weight is missing"):
        LLM(folder)
