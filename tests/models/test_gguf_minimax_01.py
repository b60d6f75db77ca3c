"""MiniMax-Text-01 in GGUF, with the names and metadata of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.models.loading import load_checkpoint
from gguf_models import finish, named_tensors, usual_metadata, writer_with
from llama_cpp_logits import llama_cpp_logits
from tiny_models import built, chain, hf_logits, hf_model, logits

TOKENS = [(7 * i + 3) % 131 for i in range(40)]
FULL, LINEAR = "full_attention", "linear_attention"
#: `transformers` counts positions by the first layer, which needs full attention for that.
LAYERS = [FULL, LINEAR, LINEAR, FULL]
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v")},
    **dict.fromkeys(("self_attn.o_proj", "self_attn.out_proj"), "attn_output"),
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.output_gate": "attn_gate",
    "self_attn.norm": "attn_norm_2",
    "mlp.gate": "ffn_gate_inp",
}


def model_of(layers: list[str] = LAYERS, factor: float = 4.0) -> Any:
    """A model whose inputs all have one factor in their sums with outputs."""
    return hf_model(
        "MiniMax",
        num_hidden_layers=len(layers),
        layer_types=layers,
        rms_norm_eps=1e-6,  # that of the norms inside lightning attention too
        head_dim=12,
        num_local_experts=5,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        **{f"{part}_alpha_factor": factor for part in ("linear_attn", "full_attn", "mlp")},
    )


def write(path: Path, model: Any, **changes: Any) -> Path:
    """Write the file; `changes` replaces tensors and metadata, None leaves them out."""
    config = model.config
    metadata: dict[str, Any] = {
        **usual_metadata(config.to_dict(), config.num_hidden_layers),
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "rope.dimension_count": 12,
        "residual_scale": config.mlp_alpha_factor,
    }
    tensors, others = named_tensors(model)
    for block, rest, tensor in others:
        if rest.endswith(".weight"):
            tensors[f"{block}{NAMES[rest.removesuffix('.weight')]}.weight"] = tensor
    for name, value in changes.items():
        target = tensors if name.startswith("blk.") else metadata
        target[name] = value
    writer = writer_with(path / "tiny.gguf", "minimax-01", metadata, config.vocab_size)
    for name, tensor in tensors.items():
        if tensor is not None:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    finish(writer)
    return path / "tiny.gguf"


def found_logits(path: Path) -> np.ndarray:
    return logits(built(load_checkpoint(path)), chain(TOKENS))


def test_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    model = model_of()
    expected = hf_logits(model, TOKENS)
    assert np.abs(found_logits(write(tmp_path, model)) - expected).max() < 1e-4
    for change in ({"residual_scale": 3.0}, {"rope.dimension_count": 6}, {"expert_used_count": 1}):
        wrong = found_logits(write(tmp_path, model, **change))
        assert np.abs(wrong - expected).max() > 1e-3, change


def test_logits_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    """It has full attention in every eighth layer."""
    model = model_of([LINEAR] * 7 + [FULL])
    path = write(tmp_path, model, **{"rope.dimension_count": 6})
    assert np.abs(found_logits(path) - llama_cpp_logits(path, TOKENS)).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"residual_scale": None}, "residual_scale is missing"),
        ({"blk.2.attn_gate.weight": None}, "layers.2.self_attn.output_gate.weight' is missing"),
        ({"blk.2.attn_norm_2.weight": None}, "layers.2.self_attn.q_proj.weight' is missing"),
        ({"blk.1.attn_qkv.weight": np.ones((48, 48), np.float32)}, "has shape"),
    ],
)
def test_other_files_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write(tmp_path, model_of(), **change))
