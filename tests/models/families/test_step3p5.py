"""Step-3.5 in GGUF: the model that `transformers` has of Step-3.7, with names and metadata of
llama.cpp's converter. Its safetensors are in `test_multimodal.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import finish, usual_metadata, writer_with
from llama_cpp_logits import llama_cpp_logits
from parity_cases import parity_module
from tiny_models import BASE, built, chain, hf_logits, logits

TOKENS = [(7 * i + 3) % 120 for i in range(24)]
NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj": "attn_output",
    "self_attn.g_proj": "attn_gate",
    "moe.gate.": "ffn_gate_inp.",
    "moe.router_bias": "exp_probs_b.bias",
    **{f"moe.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"share_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def llama3_divisors(size: int) -> np.ndarray:
    """What files have in place of the parameters of the scaling, for a head of `size` numbers that
    rotate; files go on with as many others, which nothing reads."""
    wavelengths = 2 * np.pi * 5e4 ** (np.arange(0, size, 2) / size)
    low, high, factor, original = 1.0, 4.0, 8.0, 64
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(wavelengths > original / low, factor, between)
    divisors = np.where(wavelengths < original / high, 1.0, divisors)
    return np.concatenate([divisors, np.full(size // 2, 7.0)]).astype(np.float32)


def write(folder: Path, **changes: Any) -> tuple[Any, Path]:
    """The model and its file, with some metadata changed."""
    module = parity_module("families/test_multimodal")
    settings = module.CASES["Step3p7"][0]
    model = module.saved("Step3p7", folder)
    is_sliding = [kind[0] == "s" for kind in settings["layer_types"]]
    count = len(is_sliding)
    metadata = {
        **usual_metadata({**BASE, "head_dim": 12, "rms_norm_eps": 1e-5}, count),
        "attention.head_count": [6 if sliding else 4 for sliding in is_sliding],
        "attention.head_count_kv": [2] * count,
        "attention.sliding_window": 9,
        "attention.sliding_window_pattern": is_sliding,
        "expert_count": 6,
        "expert_used_count": settings["num_experts_per_tok"],
        "expert_feed_forward_length": settings["moe_intermediate_size"],
        "expert_shared_feed_forward_length": settings["share_expert_dim"],
        "expert_weights_scale": 1.7,
        "expert_weights_norm": True,
        "leading_dense_block_count": 1,
        "rope.dimension_count": 12,
        "rope.freq_base": 5e4,
        "rope.freq_base_swa": 500.0,
        "swiglu_clamp_exp": settings["swiglu_limits"],
        "swiglu_clamp_shexp": settings["swiglu_limits_shared"],
    }
    path = folder / "tiny.gguf"
    writer = writer_with(path, "step35", {**metadata, **changes}, BASE["vocab_size"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "vi" in name.partition(".layers.")[0]:  # the vision tower and its projector
            continue
        stored = tensor + 1 if name.endswith("norm.weight") else tensor
        for usual, other in NAMES.items():
            name = name.replace(usual, other)
        writer.add_tensor(name, stored)
    writer.add_tensor("rope_freqs.weight", llama3_divisors(6))
    finish(writer)
    return model, path


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_logits_match_transformers(backend: str, tmp_path: Path) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    model, path = write(tmp_path)
    ours = built(load_checkpoint(path), executor=choose_executor(backend))
    found = logits(ours, chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4


def test_logits_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    _, path = write(tmp_path)
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - llama_cpp_logits(path, TOKENS)).max() < 1e-4


@pytest.mark.parametrize(
    "change",
    [
        {"swiglu_clamp_exp": [0.0] * 5},
        {"swiglu_clamp_shexp": [0.0] * 5},
        {"rope.freq_base_swa": 5e4},
        {"expert_weights_scale": 1.0},
        {"attention.sliding_window": 8},
    ],
)
def test_every_key_changes_the_logits(change: dict[str, Any], tmp_path: Path) -> None:
    model, path = write(tmp_path, **change)
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention.head_count": [4, 6]}, "head_count is .* a list of 5 integers"),
        ({"attention.head_count": [4] * 5}, "has shape"),
        ({"swiglu_clamp_exp": [0.5]}, "swiglu_limits is .* for each of 5 layers"),
        ({"swiglu_clamp_exp": [-1.0] * 5}, "swiglu_cap is -1.0"),
        ({"expert_gating_func": 1}, "without sigmoid scores"),
    ],
)
def test_invalid_metadata_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, path = write(tmp_path, **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
