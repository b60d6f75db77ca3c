"""Nemotron-NAS: layers of different sizes, without attention or without an MLP, against a Llama of
`transformers` that computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families import spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import finish, interleave, write_folder, writer_with
from llama_cpp_logits import llama_cpp_logits
from nemotron_models import (
    BLOCKS,
    HEAD,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    VOCAB,
    Blocks,
    as_llama,
    nemotron_checkpoint,
    nemotron_config,
)
from tiny_models import built, chain, greedy, hf_logits, hf_model, logits

BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]
PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def llama() -> Any:
    """The model of `transformers`."""
    torch = pytest.importorskip("torch")
    sizes = {"num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "vocab_size": VOCAB}
    model = hf_model(
        "Llama",
        **sizes,
        intermediate_size=max(INNER.values()),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    tensors = as_llama(nemotron_checkpoint())
    model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_match_those_of_llama(backend: str) -> None:
    theirs = llama()
    ours = built(nemotron_checkpoint(), executor=choose_executor(backend, threads=1))
    tokens = greedy(ours, PROMPT, 64)
    assert len(set(tokens)) > 2, "a model that repeats itself proves little"
    expected = hf_logits(theirs, PROMPT + tokens)
    assert expected[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens
    assert np.abs(logits(ours, chain(PROMPT + tokens)) - expected).max() < 1e-4


def gguf(path: Path, layers: Blocks = BLOCKS, **changes: Any) -> Path:
    """The model as llama.cpp's converter writes it."""
    kv_heads = [0 if group is None else HEADS // group for group, _ in layers]
    metadata = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": [INNER[factor] for _, factor in layers],
        "attention.head_count": [HEADS if count else 0 for count in kv_heads],
        "attention.head_count_kv": kv_heads,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 5000.0,
    }
    writer = writer_with(path, "deci", {**metadata, **changes}, VOCAB)
    for name, tensor in nemotron_checkpoint(layers=layers).tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleave(tensor, len(tensor) // HEAD)
        for usual, other in NAMES.items():
            name = name.replace(usual, other)
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    finish(writer)
    return path


def test_a_gguf_file_has_the_same_logits(tmp_path: Path) -> None:
    found = logits(built(load_checkpoint(gguf(tmp_path / "tiny.gguf"))), chain(PROMPT))
    expected = logits(built(nemotron_checkpoint()), chain(PROMPT))
    assert np.abs(found - expected).max() < 1e-4


def test_logits_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    """It drops the attention of layers without an MLP, so that there are none here."""
    path = gguf(tmp_path / "tiny.gguf", [*BLOCKS[:2], (None, None), BLOCKS[3]])
    expected = llama_cpp_logits(path, PROMPT)
    found = logits(built(load_checkpoint(path)), chain(PROMPT))
    assert np.abs(found - expected).max() < 1e-4


def test_the_heads_of_decilm(tmp_path: Path) -> None:
    """DeciLM-7B has a list of the heads of keys, and layers of one size otherwise."""
    config = nemotron_config(
        model_type="deci",
        block_configs=None,
        num_key_value_heads_per_layer=[4, 2, 1, 2],
        intermediate_size=64,
    )
    spec = spec_from_config(config)
    assert [one.num_kv_heads for one in spec.cache_shapes if one] == [4, 2, 1, 2]
    assert all(layer.mlp == "gated" for layer in spec.layers)


def test_a_folder_opens(tmp_path: Path) -> None:
    checkpoint = nemotron_checkpoint()
    folder = write_folder(tmp_path, dict(checkpoint.tensors), **checkpoint.config)
    found = logits(built(load_checkpoint(folder)), chain(PROMPT))
    assert np.array_equal(found, logits(built(checkpoint), chain(PROMPT)))


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("attention", {"replace_with_linear": True}, "layer 1: a linear layer in place of its att"),
        ("ffn", {"replace_with_linear": True}, "layer 1: a linear layer in place of its ffn"),
        ("attention", {"window_length": 64}, "layer 1: attention with a window"),
        ("ffn", {"ffn_mult": None, "no_op": False}, "ffn_mult is None"),
    ],
)
def test_other_sublayers_are_refused(part: str, changes: dict[str, Any], message: str) -> None:
    config = nemotron_config()
    config["block_configs"][1][part] |= changes
    with pytest.raises(CheckpointError, match=message) as caught:
        spec_from_config(config)
    assert "\n" not in str(caught.value)


def test_too_few_blocks_are_refused() -> None:
    config = nemotron_config()
    del config["block_configs"][3]
    with pytest.raises(CheckpointError, match="the number of block_configs is 3"):
        spec_from_config(config)


def test_linear_layers_of_a_gguf_file_are_refused(tmp_path: Path) -> None:
    changes = {"attention.head_count_kv": [2, 0, 0, 4]}
    with pytest.raises(CheckpointError, match="linear layers in its place"):
        load_checkpoint(gguf(tmp_path / "tiny.gguf", **changes))
