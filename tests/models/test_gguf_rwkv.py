"""RWKV-7 in GGUF, with the names, shapes and metadata of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from anydecode import LLM
from anydecode.errors import CheckpointError
from anydecode.models.loading import load_checkpoint
from anydecode.models.rwkv_tokenizer import RwkvTokenizer
from anydecode.models.time_mix import TimeMixWeights
from anydecode.quantization.gguf import quantize_file
from gguf_models import finish
from llama_cpp_logits import llama_cpp_logits
from rwkv_models import CONFIG, paper_logits, rwkv_tensors
from tiny_models import built, chain, logits

#: Rows of whole blocks, and heads of 64 numbers, which make the epsilon of the norms that of files.
SIZES: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 64,
    "head_dim": 64,
    "intermediate_size": 96,
    "vocab_size": 260,
    **{f"{part}_low_rank_dim": 32 for part in ("decay", "gate", "a", "v")},
}
TOKENS = [(7 * i + 3) % 257 for i in range(30)]
OUTER = {
    "model.embeddings": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.0.pre_norm": "token_embd_norm",
}
LAYER = {
    "attn_norm": "attn_norm",
    "ffn_norm": "attn_norm_2",
    "attn.g_norm": "time_mix_ln",
    "attn.r_proj": "time_mix_receptance",
    "attn.k_proj": "time_mix_key",
    "attn.v_proj": "time_mix_value",
    "attn.o_proj": "time_mix_output",
    "attn.k_k": "time_mix_k_k",
    "attn.k_a": "time_mix_k_a",
    "attn.r_k": "time_mix_r_k",
    "ffn.x_k": "channel_mix_lerp_k",
    "ffn.key": "channel_mix_key",
    "ffn.value": "channel_mix_value",
}


def gguf_name(name: str) -> str:
    """The name of a tensor in a file."""
    module, _, leaf = name.rpartition(".")
    if module in OUTER:
        return f"{OUTER[module]}.{leaf}"
    _, _, layer, part = name.split(".", 3)
    if "_lora" in part:
        kind, index, leaf = part[5], part.split(".")[3], part.rpartition(".")[2]
        number = 0 if leaf == "bias" else 1 if index == "0" else 2
        return f"blk.{layer}.time_mix_{kind}{number}.weight"
    if part in LAYER:
        return f"blk.{layer}.{LAYER[part]}.weight"
    return f"blk.{layer}.{LAYER[part.rpartition('.')[0]]}.{leaf}"


def write_rwkv(
    path: Path, tensors: dict[str, np.ndarray], format: str = "F32", **changes: Any
) -> Path:
    """Write a file; `changes` replace or remove (None) metadata."""
    metadata: dict[str, Any] = {
        "context_length": 1048576,
        "embedding_length": SIZES["hidden_size"],
        "block_count": SIZES["num_hidden_layers"],
        "attention.layer_norm_epsilon": 1e-5,
        "wkv.head_size": SIZES["head_dim"],
        "attention.decay_lora_rank": 32,
        "attention.iclr_lora_rank": 32,
        "attention.value_residual_mix_lora_rank": 32,
        "attention.gate_lora_rank": 32,
        "feed_forward_length": SIZES["intermediate_size"],
        "attention.head_count": 0,
        **changes,
    }
    writer = gguf.GGUFWriter(path, "rwkv7")
    for key, value in metadata.items():
        if isinstance(value, float):
            writer.add_float32(f"rwkv7.{key}", value)
        elif value is not None:
            writer.add_uint32(f"rwkv7.{key}", value)
    pieces = [repr(bytes([byte]))[2:-1] for byte in range(256)]
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["<s>", *pieces, "[PAD257]", "[PAD258]", "[PAD259]"])
    writer.add_token_types([3] + [1] * 256 + [5] * 3)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("rwkv-world")
    stored = {gguf_name(name): value for name, value in tensors.items() if ".attn.x_" not in name}
    for layer in range(SIZES["num_hidden_layers"]):
        mixes = [tensors[f"model.layers.{layer}.attn.x_{part}"] for part in "rwkvag"]
        stored[f"blk.{layer}.time_mix_lerp_fused.weight"] = np.stack(mixes)
        name = f"blk.{layer}.time_mix_r_k.weight"
        stored[name] = stored[name].ravel()
    for number in range(3):  # the first layer mixes no values; the converter fills the place
        stored[f"blk.0.time_mix_v{number}.weight"] = stored[f"blk.0.time_mix_a{number}.weight"]
    for name, tensor in stored.items():
        is_matrix = tensor.ndim == 2 and "time_mix_lerp" not in name
        kind = gguf.GGMLQuantizationType[format if is_matrix else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    finish(writer)
    return path


@pytest.mark.parametrize("format", ["F32", "F16", "Q8_0"])
def test_a_file_follows_the_papers_equations(format: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    tensors = rwkv_tensors(SIZES)
    checkpoint = load_checkpoint(write_rwkv(tmp_path / "tiny.gguf", tensors, format))
    assert isinstance(checkpoint.tokenizer, RwkvTokenizer)
    expected = paper_logits(SIZES, tensors, TOKENS)
    error = np.abs(logits(built(checkpoint), chain(TOKENS)) - expected)
    if format == "F32":
        assert error.max() < 1e-4
    else:
        assert 0 < error.mean() < 0.2 * np.abs(expected).mean()


def test_logits_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = write_rwkv(tmp_path / "tiny.gguf", rwkv_tensors(SIZES))
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(found - llama_cpp_logits(path, TOKENS)).max() < 2e-4


def test_a_file_generates_a_text(tmp_path: Path) -> None:
    path = write_rwkv(tmp_path / "tiny.gguf", rwkv_tensors(SIZES))
    with LLM(str(path)) as llm:
        assert llm.engine.runners["target"].model.spec.max_positions == 1 << 20
        answer = llm.generate("hello", max_tokens=8, temperature=0.0, ignore_eos=True)
        assert len(answer.tokens) == 8


def test_low_rank_products_are_not_quantised(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = write_rwkv(tmp_path / "tiny.gguf", rwkv_tensors(SIZES))
    quantize_file(path, tmp_path / "small.gguf", "Q8_0")
    weights = built(load_checkpoint(tmp_path / "small.gguf")).network.weights.layers[1]
    assert isinstance(weights.recurrent, TimeMixWeights)
    formats = [matrix.format for matrix in weights.recurrent.matrices]
    assert formats == ["Q8_0"] * 4 + ["F32"] * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wkv.head_size": None}, "wkv.head_size is missing"),
        ({"wkv.head_size": 48}, "head_dim is 48; allowed is a divisor"),
        ({"wkv.head_size": 0}, "wkv.head_size is 0"),
        ({"attention.decay_lora_rank": 31}, "w_lora.lora.0.weight' has shape"),
        ({"attention.iclr_lora_rank": None}, "iclr_lora_rank is missing"),
        ({"attention.gate_lora_rank": 0}, "gate_lora_rank is 0"),
        ({"attention.layer_norm_epsilon": 2.0}, "layer_norm_eps is 2.0|norm_eps is 2.0"),
        ({"token_shift_count": 1}, "without channel mixing"),
        ({"feed_forward_length": 95}, "ffn.key.weight' has shape"),
        ({"embedding_length": 128}, "has shape"),
        ({"block_count": 4}, "layers.3.*is missing"),
    ],
)
def test_invalid_metadata_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_rwkv(tmp_path / "tiny.gguf", rwkv_tensors(SIZES), **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["k_a", "v_lora.lora.0.weight", "g_norm.bias", "k_proj.weight"])
def test_missing_tensors_are_refused(part: str, tmp_path: Path) -> None:
    tensors = rwkv_tensors(SIZES)
    del tensors[f"model.layers.1.attn.{part}"]
    with pytest.raises(CheckpointError, match=f"layers.1.attn.{part}' is missing"):
        load_checkpoint(write_rwkv(tmp_path / "tiny.gguf", tensors))


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    path = write_rwkv(tmp_path / "tiny.gguf", rwkv_tensors(SIZES))
    name = b"blk.1.time_mix_k_a.weight"
    path.write_bytes(path.read_bytes().replace(name, b"blk.1.time_mix_x_a.weight"))
    with pytest.raises(CheckpointError, match="time_mix_x_a.* is not part of the rwkv7 models"):
        load_checkpoint(path)
