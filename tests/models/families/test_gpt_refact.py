"""Refact: linear biases, one key head and layer norms, against a forward pass in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import finish, tensor_names, write_folder, writer_with
from refact_models import CONFIG, HEADS, HIDDEN, INNER, LAYERS, VOCAB, forward, refact_tensors
from tiny_models import built, chain, logits

TEXT = [5, 17, 99, 3, 64, 11, 42, 42, 7, 101, 5, 17]
BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]
#: Files have the key of RMS norms, which llama.cpp computes in place of the model's layer norms.
METADATA = {
    "context_length": 256,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "block_count": LAYERS,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def as_gguf(path: Path, stored: dict[str, np.ndarray]) -> Path:
    """The model as llama.cpp's converter writes it."""
    writer = writer_with(path, "refact", METADATA, VOCAB)
    names = tensor_names("refact", LAYERS)
    for name, tensor in stored.items():
        block = f"blk.{name.split('.')[2]}." if ".h." in name else ""
        if name.endswith("attn.q.weight"):
            parts = {f"{block}attn_q.weight": tensor}
        elif name.endswith("attn.kv.weight"):
            k, v = np.split(tensor, 2)
            parts = {f"{block}attn_k.weight": k, f"{block}attn_v.weight": v}
        elif name.endswith("gate_up_proj.weight"):
            gate, up = np.split(tensor, 2)
            parts = {f"{block}ffn_gate.weight": gate, f"{block}ffn_up.weight": up}
        else:
            usual = "transformer.ln_f.weight" if name == "ln_f.weight" else name
            parts = {names.get_name(usual, try_suffixes=(".weight",)): tensor}
        for target, part in parts.items():
            assert target is not None, name
            writer.add_tensor(target, np.ascontiguousarray(part))
    finish(writer)
    return path


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_those_of_another_forward_pass(backend: str, tmp_path: Path) -> None:
    """Wrong twin: RMS norms."""
    if backend == "torch":
        pytest.importorskip("torch")
    stored = refact_tensors()
    write_folder(tmp_path, stored, **CONFIG)
    model = built(load_checkpoint(tmp_path), executor=choose_executor(backend, threads=1))
    found, expected = logits(model, chain(TEXT)), forward(stored, TEXT)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    wrong = forward(stored, TEXT, is_rms=True)
    assert np.abs(found - wrong).max() > 1e-3 * np.abs(wrong).max()


def test_logits_of_a_gguf_file(tmp_path: Path) -> None:
    stored = refact_tensors()
    found = logits(built(load_checkpoint(as_gguf(tmp_path / "a.gguf", stored))), chain(TEXT))
    expected = forward(stored, TEXT)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multi_query": False}, "multi_query False is not supported in a gpt_refact config"),
        ({"n_inner": 2000}, "has shape"),
        ({"n_head": 5}, "num_attention_heads is 5"),
    ],
)
def test_bad_configs_end_in_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_folder(tmp_path, refact_tensors(), **{**CONFIG, **change})
    with pytest.raises(CheckpointError, match=message) as caught:
        built(load_checkpoint(tmp_path))
    assert "\n" not in str(caught.value)
