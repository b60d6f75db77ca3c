"""Muse Glimmer in GGUF: the model of `transformers`, with names and metadata of llama.cpp's
converter. Its safetensors are in `test_multimodal.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families import spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import finish, interleave, usual_metadata, writer_with
from llama_cpp_logits import llama_cpp_logits
from parity_cases import parity_module
from tiny_models import BASE, built, chain, greedy, hf_logits, logits

TOKENS = [(7 * i + 3) % 120 for i in range(24)]
NAMES = {
    "model.language_model.embed_tokens.": "token_embd.",
    "model.language_model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.language_model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.gate_proj": "attn_gate",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
SLIDING = [True, True, True, False]


#: A model, its folder, and what its logits are with other epsilons behind sublayers.
Saved = tuple[Any, Path, Callable[[float, list[int]], np.ndarray]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("muse")
    model = parity_module("families/test_multimodal").saved("MuseGlimmer", folder)

    def expected(eps: float, tokens: list[int]) -> np.ndarray:
        for name, module in model.named_modules():
            if name.endswith(("post_attention_layernorm", "post_feedforward_layernorm")):
                module.eps = eps
        return hf_logits(model, tokens)

    return model, folder, expected


def write(folder: Path, path: Path, **changes: Any) -> Path:
    """The file of the model in a folder, with some metadata changed."""
    count = len(SLIDING)
    metadata = {
        **usual_metadata({**BASE, "head_dim": 12, "rms_norm_eps": 1e-5}, count),
        "attention.sliding_window": 9,
        "attention.sliding_window_pattern": SLIDING,
        "rope.dimension_count": 12,
        "rope.freq_base": 10_000.0,
        "rope.freq_base_swa": 10_000.0,
        "final_logit_softcapping": 20.0,
        "logit_scale": 0.7,
    }
    writer = writer_with(path, "muse-glimmer", {**metadata, **changes}, BASE["vocab_size"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "language_model" not in name and name != "lm_head.weight":
            continue
        stored = tensor + 1 if name.endswith("layernorm.weight") else tensor
        for kind, heads in (("q_proj", 4), ("k_proj", 2)):
            stored = interleave(stored, heads) if f".{kind}." in name else stored
        for usual, other in NAMES.items():
            name = name.replace(usual, other)
        writer.add_tensor(name, stored)
    for layer in range(count):
        for part, factor in (("q", 2.5), ("k", 1.0)):
            name = f"blk.{layer}.attn_{part}_norm.weight"
            writer.add_tensor(name, np.full(12, factor, np.float32))
    finish(writer)
    return path


def test_logits_of_a_gguf_file(saved: Saved, tmp_path: Path) -> None:
    """Files have no key for the epsilon of the norms behind sublayers."""
    _, folder, expected = saved
    found = logits(built(load_checkpoint(write(folder, tmp_path / "x.gguf"))), chain(TOKENS))
    assert np.abs(found - expected(1e-8, TOKENS)).max() < 1e-4
    assert np.abs(found - expected(0.02, TOKENS)).max() > 1e-3


def test_logits_equal_those_of_llama_cpp(saved: Saved, tmp_path: Path) -> None:
    path = write(saved[1], tmp_path / "x.gguf")
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - llama_cpp_logits(path, TOKENS)).max() < 1e-4


@pytest.mark.parametrize("backend", ["torch", *(["native"] if load_library() is not None else [])])
def test_logits_and_greedy_tokens_match_transformers(backend: str, saved: Saved) -> None:
    _, folder, expected = saved
    own = built(load_checkpoint(folder), executor=choose_executor(backend, threads=1))
    tokens = greedy(own, TOKENS, 64)
    assert len(set(tokens)) > 2, "a model that repeats itself proves little"
    rows = expected(0.02, TOKENS + tokens)
    assert rows[len(TOKENS) - 1 : -1].argmax(-1).tolist() == tokens
    assert np.abs(logits(own, chain(TOKENS + tokens)) - rows).max() < 1e-4


@pytest.mark.parametrize(
    "change",
    [
        {"attention.sliding_window": 8},
        {"attention.sliding_window_pattern": [True, True, False, False]},
        {"rope.freq_base_swa": 5000.0},
        {"final_logit_softcapping": None},
        {"logit_scale": 0.6},
    ],
)
def test_every_key_changes_the_logits(change: dict[str, Any], saved: Saved, tmp_path: Path) -> None:
    _, folder, expected = saved
    path = write(folder, tmp_path / "x.gguf", **change)
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - expected(1e-8, TOKENS)).max() > 1e-3


def test_layers_without_positions_are_those_of_full_attention() -> None:
    """Of six layers the second and the last; other layers may be listed."""
    sizes = {**BASE, "model_type": "muse_glimmer_text"}
    spec = spec_from_config({**sizes, "num_hidden_layers": 6})
    assert [layer.rope is None for layer in spec.layers] == [False, True, *[False] * 3, True]
    listed = {"num_hidden_layers": 3, "layer_rope_theta": [0, 500.0, 0]}
    spec = spec_from_config({**sizes, **listed})
    assert [layer.rope is None for layer in spec.layers] == [True, False, True]
    assert all(layer.qk_norm == "plain" for layer in spec.layers)


def test_factors_that_are_not_constant_are_refused(saved: Saved, tmp_path: Path) -> None:
    path = write(saved[1], tmp_path / "x.gguf")
    data, stored = path.read_bytes(), np.full(12, 2.5, np.float32).tobytes()
    assert data.count(stored) == len(SLIDING)
    path.write_bytes(data.replace(stored, np.full(12, 2.0, np.float32).tobytes(), 1))
    with pytest.raises(CheckpointError, match="attn_q_norm.weight' and its like are not") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
