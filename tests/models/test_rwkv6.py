"""RWKV-6 against the paper's equations, from folders as published and from GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import finish, write_folder, writer_with
from llama_cpp_logits import llama_cpp_logits
from rwkv6_models import (
    CONFIG,
    DECAY_RANK,
    HEAD,
    HIDDEN,
    INNER,
    LAYERS,
    RANK,
    VOCAB,
    paper_logits,
    rwkv6_checkpoint,
    rwkv6_tensors,
)
from tiny_models import built, chain, greedy, logits

TOKENS = [(7 * i + 3) % 257 for i in range(30)]
BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]
OUTER = {
    "rwkv.embeddings": "token_embd",
    "rwkv.ln_out": "output_norm",
    "head": "output",
    "rwkv.blocks.0.pre_ln": "token_embd_norm",
}
LAYER = {
    "ln1": "attn_norm",
    "ln2": "attn_norm_2",
    "attention.ln_x": "time_mix_ln",
    "attention.time_faaaa": "time_mix_first",
    "attention.time_decay": "time_mix_decay",
    **{f"attention.time_decay_w{i}": f"time_mix_decay_w{i}" for i in (1, 2)},
    **{f"attention.time_maa_w{i}": f"time_mix_w{i}" for i in (1, 2)},
    **{f"attention.time_maa_{x}": f"time_mix_lerp_{x}" for x in "xwkvrg"},
    **{
        f"attention.{part}": f"time_mix_{part}"
        for part in ("receptance", "key", "value", "gate", "output")
    },
    **{f"feed_forward.time_maa_{x}": f"channel_mix_lerp_{x}" for x in "kr"},
    **{f"feed_forward.{part}": f"channel_mix_{part}" for part in ("receptance", "key", "value")},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_follow_the_papers_equations(backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    own = built(rwkv6_checkpoint(), executor=choose_executor(backend, threads=1))
    tokens = greedy(own, TOKENS, 40)
    expected = paper_logits(rwkv6_tensors(), TOKENS + tokens)
    assert len(set(tokens)) > 2, "a model that repeats itself proves little"
    assert expected[len(TOKENS) - 1 : -1].argmax(-1).tolist() == tokens
    assert np.abs(logits(own, chain(TOKENS + tokens)) - expected).max() < 1e-4


@pytest.mark.parametrize("twin", ["no receptance", "constant shares", "the state after the row"])
def test_wrong_twins_have_other_logits(twin: str) -> None:
    found = logits(built(rwkv6_checkpoint()), chain(TOKENS))
    assert np.abs(found - paper_logits(rwkv6_tensors(), TOKENS, twin)).max() > 1e-2


def test_a_published_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", rwkv6_tensors(), **CONFIG)
    found = logits(built(load_checkpoint(folder)), chain(TOKENS))
    assert np.array_equal(found, logits(built(rwkv6_checkpoint()), chain(TOKENS)))


def as_gguf(path: Path, period: int = 2, is_fused: bool = True, **changes: Any) -> Path:
    """The file that llama.cpp's converter makes: the outputs of layers are halved once for every
    `period` layers before."""
    metadata: dict[str, Any] = {
        "context_length": 1048576,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "attention.layer_norm_epsilon": 1e-5,
        "rescale_every_n_layers": period,
        "wkv.head_size": HEAD,
        "time_mix_extra_dim": RANK,
        "time_decay_extra_dim": DECAY_RANK,
        "feed_forward_length": INNER,
        "attention.head_count": 0,
        **changes,
    }
    writer = writer_with(path, "rwkv6", metadata, VOCAB)
    mixes: dict[str, list[np.ndarray]] = {}
    for name, tensor in rwkv6_tensors().items():
        module, _, leaf = name.rpartition(".")
        if module in OUTER:
            writer.add_tensor(f"{OUTER[module]}.{leaf}", tensor)
            continue
        _, _, layer, part = name.split(".", 3)
        module, leaf = (part, "weight") if part in LAYER else part.rsplit(".", 1)
        if part in ("attention.output.weight", "feed_forward.value.weight") and period:
            tensor = tensor / np.float32(2 ** (int(layer) // period))
        if module.endswith(("_w1", "_w2")):
            tensor = np.ascontiguousarray(tensor.swapaxes(-1, -2))
        elif tensor.ndim == 3:
            tensor = tensor.ravel()
        if (
            is_fused
            and ".time_maa_" in f".{module}"
            and module[-2:] in ("_w", "_k", "_v", "_r", "_g")
        ):
            if "attention" in module:
                mixes.setdefault(layer, []).append(tensor)
                continue
        writer.add_tensor(f"blk.{layer}.{LAYER[module]}.{leaf}", tensor)
    for layer, parts in mixes.items():
        fused = np.stack(parts)[:, None, None]
        writer.add_tensor(f"blk.{layer}.time_mix_lerp_fused.weight", fused)
    finish(writer)
    return path


@pytest.mark.parametrize(("period", "is_fused"), [(2, True), (0, True), (2, False)])
def test_logits_of_a_gguf_file(period: int, is_fused: bool, tmp_path: Path) -> None:
    path = as_gguf(tmp_path / "tiny.gguf", period, is_fused)
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - paper_logits(rwkv6_tensors(), TOKENS)).max() < 1e-4


def test_logits_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    path = as_gguf(tmp_path / "tiny.gguf", **{"token_shift_count": 2})
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - llama_cpp_logits(path, TOKENS)).max() < 2e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wkv.head_size": 24}, "a divisor of the hidden size 64"),
        ({"time_mix_extra_dim": 6}, "has shape"),
        ({"time_decay_extra_dim": 6}, "has shape"),
    ],
)
def test_metadata_against_tensors(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(as_gguf(tmp_path / "tiny.gguf", **changes))
    assert "\n" not in str(caught.value)


def test_a_file_without_shares_of_the_position_before_is_refused(tmp_path: Path) -> None:
    path = as_gguf(tmp_path / "tiny.gguf", is_fused=False)
    whole = path.read_bytes()
    path.write_bytes(
        whole.replace(b"blk.1.time_mix_lerp_w.weight", b"blk.1.time_mix_lerp_x2weight")
    )
    with pytest.raises(CheckpointError) as caught:
        built(load_checkpoint(path))
    assert "\n" not in str(caught.value)
