"""ARWKV against the paper's equations of RWKV-7 in Qwen2, and as a GGUF file."""

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
from rwkv_models import ARWKV_CONFIG, paper_logits, rwkv_checkpoint, rwkv_tensors
from tiny_models import built, chain, greedy, logits

BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]
TOKENS = [(7 * i + 3) % 131 for i in range(24)]
#: With gates and norms of heads, as some are trained, and without. llama.cpp has heads of 64 alone.
SIZES = {**ARWKV_CONFIG, "hidden_size": 128, "head_dim": 64, "value_dim": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": SIZES,
    "whole": {**SIZES, "has_gate": True, "has_head_norms": True},
}
PUBLISHED = {
    "r_proj": "receptance",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "g_norm": "ln_x",
}
PUBLISHED_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "rms_norm_eps"),
    "tie_word_embeddings",
)
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attn.g_norm": "time_mix_ln",
    "attn.r_proj": "time_mix_receptance",
    "attn.k_proj": "time_mix_key",
    "attn.v_proj": "time_mix_value",
    "attn.o_proj": "time_mix_output",
    **{f"attn.{part}": f"time_mix_{part}" for part in ("k_k", "k_a", "r_k")},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens_follow_the_papers_equations(name: str, backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    config = CONFIGS[name]
    own = built(rwkv_checkpoint(**config), executor=choose_executor(backend, threads=1))
    tokens = greedy(own, TOKENS, 40)
    assert len(set(tokens)) > 2, "a model that repeats itself proves little"
    expected = paper_logits(config, rwkv_tensors(config), TOKENS + tokens)
    assert expected[len(TOKENS) - 1 : -1].argmax(-1).tolist() == tokens
    # A change of all weights by 1e-7 of them moves one of the rows by 1.5e-4, the others by 1e-5.
    differences = np.abs(logits(own, chain(TOKENS + tokens)) - expected).max(-1)
    assert np.median(differences) < 5e-5 and differences.max() < 3e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_folder(name: str, tmp_path: Path) -> None:
    config, mixer = CONFIGS[name], "self_attn.time_mixer"
    published = {}
    for usual, tensor in rwkv_tensors(config).items():
        before, own, part = usual.partition(".attn.")
        if not own:
            published[usual] = tensor
            continue
        module, _, leaf = part.partition(".")
        if "_lora" in module:
            number = {"lora.0.weight": 1, "lora.2.weight": 2, "lora.2.bias": 0}[leaf]
            tensor = np.ascontiguousarray(tensor.T) if number else tensor[None, None]
            part = f"{module[0]}{number}"
        elif part in ("k_k", "k_a"):
            tensor = tensor[None, None]
        elif module in PUBLISHED:
            part = f"{PUBLISHED[module]}.{leaf}"
        published[f"{before}.{mixer}.{part}"] = tensor
    ranks = {key: config[key] for key in config if key.endswith("_low_rank_dim")}
    folder = write_folder(
        tmp_path / "tiny",
        published,
        architectures=["RwkvHybridForCausalLM"],
        model_type="rwkv_hybrid",
        wkv_version=7,
        wkv_layers="full",
        wkv_has_gate=config["has_gate"],
        wkv_has_group_norm=config["has_head_norms"],
        head_size=config["head_dim"],
        **{key: config[key] for key in PUBLISHED_KEYS},
        **ranks,
    )
    found = logits(built(load_checkpoint(folder)), chain(TOKENS))
    assert np.array_equal(found, logits(built(rwkv_checkpoint(**config)), chain(TOKENS)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wkv_version": 6}, "wkv_version is 6; allowed is 7"),
        ({"wkv_layers": [0, 2]}, r"wkv_layers is \[0, 2\]; allowed is 'full'"),
    ],
)
def test_settings_that_are_not_supported(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        built(rwkv_checkpoint(**ARWKV_CONFIG, **change))


def as_gguf(path: Path, config: dict[str, Any]) -> Path:
    """The file that llama.cpp's converter makes."""
    has_gate, hidden = config["has_gate"], config["hidden_size"]
    mixes = "rwkvag" if has_gate else "rwkva"
    metadata = {
        "context_length": 1048576,
        "embedding_length": hidden,
        "block_count": config["num_hidden_layers"],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "wkv.head_size": config["head_dim"],
        "attention.decay_lora_rank": config["decay_low_rank_dim"],
        "attention.iclr_lora_rank": config["a_low_rank_dim"],
        "attention.value_residual_mix_lora_rank": config["v_low_rank_dim"],
        "attention.gate_lora_rank": config["gate_low_rank_dim"] if has_gate else 0,
        "feed_forward_length": config["intermediate_size"],
        "token_shift_count": 1,
        "attention.head_count": 0,
    }
    tensors = rwkv_tensors(config)
    writer = writer_with(path, "arwkv7", metadata, config["vocab_size"])
    for layer in range(config["num_hidden_layers"]):
        parts = [tensors.pop(f"model.layers.{layer}.attn.x_{part}") for part in mixes]
        fused = np.concatenate(parts)[:, None]
        writer.add_tensor(f"blk.{layer}.time_mix_lerp_fused.weight", fused)
    for number in range(3):  # the first layer mixes no values; the converter fills the place
        part = "2.bias" if number == 0 else f"{2 * number - 2}.weight"
        tensor = tensors[f"model.layers.0.attn.a_lora.lora.{part}"]
        writer.add_tensor(f"blk.0.time_mix_v{number}.weight", tensor)
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if module in OUTER:
            writer.add_tensor(f"{OUTER[module]}.{leaf}", tensor)
            continue
        _, _, layer, part = name.split(".", 3)
        if "_lora" in part:
            number = {"2.bias": 0, "0.weight": 1, "2.weight": 2}[part.split("lora.")[-1]]
            target = f"time_mix_{part[5]}{number}.weight"
        else:
            module, leaf = (part, "weight") if part in LAYER else part.rsplit(".", 1)
            target = f"{LAYER[module]}.{leaf}"
        stored = tensor.ravel() if part.endswith("r_k") else tensor
        writer.add_tensor(f"blk.{layer}.{target}", stored)
    finish(writer)
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_a_gguf_file(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    found = logits(built(load_checkpoint(as_gguf(tmp_path / "x.gguf", config))), chain(TOKENS))
    expected = paper_logits(config, rwkv_tensors(config), TOKENS)
    assert np.abs(found - expected).max() < 1e-4
    other = CONFIGS["whole" if name == "plain" else "plain"]
    assert np.abs(expected - paper_logits(other, rwkv_tensors(other), TOKENS)).max() > 1e-2


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    path = as_gguf(tmp_path / "x.gguf", CONFIGS[name])
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - llama_cpp_logits(path, TOKENS)).max() < 1e-4
