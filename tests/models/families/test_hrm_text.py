"""HRM-Text as it is published, and as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.models.loading import load_checkpoint
from gguf_models import finish, usual_metadata, write_folder, writer_with
from llama_cpp_logits import llama_cpp_logits
from tiny_models import built, chain, checkpoint_of, hf_logits, hf_model, logits, own_model

TOKENS = [(7 * i + 3) % 131 for i in range(24)]
FUSED = {
    "attn.gqkv_proj": [f"self_attn.{part}_proj" for part in ("gate", "q", "k", "v")],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
}
NAMES = {
    "self_attn.gate_proj": "attn_gate",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.z_L_init": "hrm.z_l_init",
}


def tiny() -> Any:
    """Two layers in each stack."""
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_key_value_heads": 4, "head_dim": 6}
    cycles = {"num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 2}
    return hf_model("HrmText", **sizes, **cycles, rms_norm_eps=1e-2)


def published(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gate, queries, keys and values as one matrix, gate and up of MLPs as another."""
    found = {name: x for name, x in tensors.items() if "_proj" not in name}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name.replace("self_attn", "attn")] = tensor
        for whole, parts in FUSED.items():
            if f".{parts[0]}." in name:
                matrices = [tensors[name.replace(parts[0], part)] for part in parts]
                found[name.replace(parts[0], whole)] = np.concatenate(matrices)
    return found


def test_a_published_folder(tmp_path: Path) -> None:
    """The number of layers is that of a stack."""
    model = tiny()
    config = {**model.config.to_dict(), "num_layers_per_stack": None, "num_hidden_layers": 2}
    folder = write_folder(tmp_path / "tiny", published(checkpoint_of(model).tensors), **config)
    found = logits(built(load_checkpoint(folder)), chain(TOKENS))
    assert np.array_equal(found, logits(own_model(model), chain(TOKENS)))


def as_gguf(model: Any, path: Path, **changes: Any) -> Path:
    """The file that llama.cpp's converter makes: the blocks of the low stack, then the others."""
    config = model.config
    metadata = {
        **usual_metadata(config.to_dict(), config.num_hidden_layers),
        "attention.head_count_kv": config.num_attention_heads,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": config.head_dim,
        "embedding_scale": float(config.embedding_scale),
        "hrm.layers_per_stack": config.num_layers_per_stack,
        "hrm.h_cycles": config.H_cycles,
        "hrm.l_cycles": config.L_cycles,
        "hrm.prefix_lm": False,
        **changes,
    }
    writer = writer_with(path, "hrm_text", metadata, config.vocab_size)
    for name, tensor in checkpoint_of(model).tensors.items():
        target = OUTER.get(name)
        if target is None:
            _, stack, _, layer, rest = name.split(".", 4)
            first = 0 if stack == "L_module" else config.num_layers_per_stack
            module, _, leaf = rest.rpartition(".")
            target = f"blk.{first + int(layer)}.{NAMES[module]}.{leaf}"
        writer.add_tensor(target, np.ascontiguousarray(tensor, np.float32))
    finish(writer)
    return path


def test_logits_of_a_gguf_file(tmp_path: Path) -> None:
    model = tiny()
    path = as_gguf(model, tmp_path / "tiny.gguf")
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4


def test_logits_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    path = as_gguf(tiny(), tmp_path / "tiny.gguf")
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - llama_cpp_logits(path, TOKENS)).max() < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"embedding_scale": 1.0},
        {"hrm.h_cycles": 1, "hrm.l_cycles": 5},
        {"rope.freq_base": 500.0},
    ],
)
def test_every_key_changes_the_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny()
    path = as_gguf(model, tmp_path / "tiny.gguf", **changes)
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() > 1e-2


def test_a_file_with_another_number_of_layers_is_refused(tmp_path: Path) -> None:
    path = as_gguf(tiny(), tmp_path / "tiny.gguf", **{"hrm.l_cycles": 3})
    with pytest.raises(CheckpointError, match="block_count is 12; allowed is 16") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
