"""RWKV-6 in Qwen2 against the equations of its code, from folders as published and from GGUF."""

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
from rwkv6_qwen2_models import (
    CONFIG,
    DECAY_RANK,
    GROUPS,
    HEAD,
    HIDDEN,
    INNER,
    LAYERS,
    RANK,
    VOCAB,
    checkpoint,
    expected_logits,
    tensors,
)
from tiny_models import built, chain, greedy, logits

TOKENS = [(7 * i + 3) % 257 for i in range(30)]
BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "time_mix_receptance",
    "self_attn.k_proj": "time_mix_key",
    "self_attn.v_proj": "time_mix_value",
    "self_attn.o_proj": "time_mix_output",
    "self_attn.gate": "time_mix_gate",
    "self_attn.time_decay": "time_mix_decay",
    **{f"self_attn.time_decay_w{i}": f"time_mix_decay_w{i}" for i in (1, 2)},
    **{f"self_attn.time_maa_w{i}": f"time_mix_w{i}" for i in (1, 2)},
    "self_attn.time_maa_x": "time_mix_lerp_x",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_follow_the_equations(backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    own = built(checkpoint(), executor=choose_executor(backend, threads=1))
    tokens = greedy(own, TOKENS, 64)
    expected = expected_logits(tensors(), TOKENS + tokens)
    assert len(set(tokens)) > 2, "a model that repeats itself proves little"
    assert expected[len(TOKENS) - 1 : -1].argmax(-1).tolist() == tokens
    assert np.abs(logits(own, chain(TOKENS + tokens)) - expected).max() < 1e-4


@pytest.mark.parametrize(
    "twin",
    [
        "the order of RWKV-6", "no limit of the decay", "tiled heads", "whole keys",
        "the state before the row", "SiLU",
    ],
)  # fmt: skip
def test_wrong_twins_have_other_logits(twin: str) -> None:
    found = logits(built(checkpoint()), chain(TOKENS))
    assert np.abs(found - expected_logits(tensors(), TOKENS, twin)).max() > 1e-3


def test_a_published_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", tensors(), **CONFIG)
    found = logits(built(load_checkpoint(folder)), chain(TOKENS))
    assert np.array_equal(found, logits(built(checkpoint()), chain(TOKENS)))


def as_gguf(
    path: Path, stored: dict[str, np.ndarray], heads: int | None = GROUPS, **changes: Any
) -> Path:
    """The file that llama.cpp's converter makes; its mixtures have the order of RWKV-6."""
    metadata: dict[str, Any] = {
        "context_length": 1048576,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "wkv.head_size": HEAD,
        "time_mix_extra_dim": RANK,
        "time_decay_extra_dim": DECAY_RANK,
        "feed_forward_length": INNER,
        "token_shift_count": 1,
        "attention.head_count_kv": heads,
        "attention.head_count": 0,
        **changes,
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    writer, stored = writer_with(path, "rwkv6qwen2", metadata, VOCAB), dict(stored)
    for layer in range(LAYERS):
        start = f"model.layers.{layer}.self_attn.time_maa"
        fused = np.stack([stored.pop(f"{start}_{part}") for part in "wkvrg"])
        writer.add_tensor(f"blk.{layer}.time_mix_lerp_fused.weight", fused)
        for name in ("w1", "w2"):
            parts = stored[f"{start}_{name}"].swapaxes(-1, -2).reshape(5, -1, RANK)
            parts = parts if name == "w2" else stored[f"{start}_w1"].T.reshape(5, RANK, HIDDEN)
            ordered = np.ascontiguousarray(parts[[3, 1, 2, 0, 4]])
            ordered = ordered if name == "w2" else ordered.reshape(-1, HIDDEN)
            writer.add_tensor(f"blk.{layer}.time_mix_{name}.weight", ordered)
            del stored[f"{start}_{name}"]
    for name, tensor in stored.items():
        module, _, leaf = name.rpartition(".")
        if module in OUTER:
            writer.add_tensor(f"{OUTER[module]}.{leaf}", tensor)
            continue
        _, _, layer, part = name.split(".", 3)
        module, leaf = (part, "weight") if part in LAYER else part.rsplit(".", 1)
        tensor = np.ascontiguousarray(tensor.T) if module[-3:] in ("_w1", "_w2") else tensor
        tensor = tensor.ravel() if tensor.ndim == 3 else tensor
        writer.add_tensor(f"blk.{layer}.{LAYER[module]}.{leaf}", tensor)
    finish(writer)
    return path


@pytest.mark.parametrize("has_bias", [True, False])
def test_logits_of_a_gguf_file(has_bias: bool, tmp_path: Path) -> None:
    stored = tensors(has_bias=has_bias)
    found = logits(built(load_checkpoint(as_gguf(tmp_path / "x.gguf", stored))), chain(TOKENS))
    assert np.abs(found - expected_logits(stored, TOKENS)).max() < 1e-4


def test_logits_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    """llama.cpp does not limit decays: these stay below the limit of the published code."""
    stored = tensors()
    for layer in range(LAYERS):
        stored[f"model.layers.{layer}.self_attn.time_decay"] -= np.float32(1.5)
    found = logits(built(load_checkpoint(as_gguf(tmp_path / "x.gguf", stored))), chain(TOKENS))
    unlimited = expected_logits(stored, TOKENS, "no limit of the decay")
    assert np.abs(unlimited - expected_logits(stored, TOKENS)).max() < 1e-4, "decays are limited"
    assert np.abs(found - llama_cpp_logits(tmp_path / "x.gguf", TOKENS)).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_rank_type": 2}, "gate_rank_type is 2; allowed is 1"),
        ({"use_rope": True}, "use_rope is True; allowed is false"),
        ({"attention_output_bias": True}, "attention_output_bias is True; allowed is false"),
        ({"num_key_value_heads": 3}, "num_groups is 3; allowed is a divisor of the 4 heads"),
    ],
)
def test_settings_that_are_not_supported(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "tiny", tensors(), **{**CONFIG, **change})
    with pytest.raises(CheckpointError, match=message):
        built(load_checkpoint(folder))


def test_other_sizes_in_the_metadata_are_refused(tmp_path: Path) -> None:
    path = as_gguf(tmp_path / "x.gguf", tensors(), heads=None)
    with pytest.raises(CheckpointError, match=r"attention\.key\.weight' has shape \[32, 64\]"):
        load_checkpoint(path)
