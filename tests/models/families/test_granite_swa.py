"""GGUF files of Granite with windows and sinks, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.models.loading import load_checkpoint
from gguf_models import finish, interleave, usual_metadata, writer_with
from llama_cpp_logits import llama_cpp_logits
from tiny_models import built, chain, hf_logits, hf_model, logits

TEXT = [(7 * i + 3) % 131 for i in range(24)]
COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    "layer_rope_theta": [0, 500.0, 500.0, 500.0],
    "sliding_window": 6,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
}
METADATA: dict[str, Any] = {
    "rope.freq_base": 500.0,
    "rope.dimension_count": 12,
    "embedding_scale": 2.0,
    "attention.scale": 0.3,
    "residual_scale": 0.6,
    "logit_scale": 1.5,
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [False, True, True, False],
    "attention.rope_pattern": [False, True, True, True],
}
#: The classes of `transformers`, their settings, and the keys beside those above.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("GraniteSWA", {}, {}),
    "experts": (
        "GraniteMoeSWA",
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        {"expert_count": 5, "expert_used_count": 2},
    ),
    "shared": (
        "GraniteMoeSWA",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
        {"expert_count": 5, "expert_used_count": 2, "expert_shared_feed_forward_length": 40},
    ),
}
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.sinks": "attn_sinks.weight",
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
    "shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def original(case: str) -> Any:
    family, settings, _ = CASES[case]
    return hf_model(family, **{**COMMON, **settings})


def converted(case: str, model: Any, path: Path, **changes: Any) -> Path:
    config = model.config.to_dict()
    metadata = {**usual_metadata(config, 4), **METADATA, **CASES[case][2], **changes}
    writer = writer_with(path, "granite_swa", metadata, config["vocab_size"])
    for name, parameter in model.state_dict().items():
        tensor, (_, _, rest) = parameter.numpy(), name.partition(".layers.")
        layer, _, part = rest.partition(".")
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        for kind, heads in (("q_proj", 4), ("k_proj", 2)):
            tensor = interleave(tensor, heads) if f".{kind}." in name else tensor
        writer.add_tensor(f"blk.{layer}.{NAMES[part]}" if layer else OUTER[name], tensor)
    finish(writer)
    return path


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = original(case)
    checkpoint = load_checkpoint(converted(case, model, tmp_path / "tiny.gguf"))
    found = logits(built(checkpoint), chain(TEXT))
    assert np.abs(found - hf_logits(model, TEXT)).max() < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_llama_cpp(case: str, tmp_path: Path) -> None:
    path = converted(case, original(case), tmp_path / "tiny.gguf")
    found = logits(built(load_checkpoint(path)), chain(TEXT))
    assert np.abs(found - llama_cpp_logits(path, TEXT)).max() < 1e-4


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("dense", {"attention.rope_pattern": None}),
        ("dense", {"attention.sliding_window": 5}),
        ("dense", {"attention.sliding_window_pattern": [False, False, True, False]}),
        ("dense", {"residual_scale": None}),
        ("experts", {"expert_used_count": 1}),
    ],
)
def test_every_key_changes_the_logits(case: str, change: dict[str, Any], tmp_path: Path) -> None:
    model = original(case)
    checkpoint = load_checkpoint(converted(case, model, tmp_path / "tiny.gguf", **change))
    found = logits(built(checkpoint), chain(TEXT))
    assert np.abs(found - hf_logits(model, TEXT)).max() > 1e-3


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("dense", {"attention.rope_pattern": [True]}, r"rope_pattern is \[True\]; allowed is a li"),
        ("dense", {"attention.sliding_window": None}, "attention.sliding_window is missing"),
        ("shared", {"expert_shared_feed_forward_length": 48}, "shared_mlp.* has shape"),
    ],
)
def test_invalid_metadata_are_refused(
    case: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = converted(case, original(case), tmp_path / "tiny.gguf", **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
