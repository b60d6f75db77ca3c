"""Checkpoint loading: GGUF against the original model, safetensors folders, GPTQ and AWQ."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from anydecode.errors import CheckpointError, ModelNotFoundError
from anydecode.kernels.formats import DTYPES, dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.loading import load_checkpoint
from gguf_models import (
    CLASSES,
    CONFIGS,
    EXPERTS,
    FAMILIES,
    GPTQ_CASES,
    HEAD,
    HEADS,
    HIDDEN,
    INNER,
    KV,
    LAYERS,
    OUTER,
    ROPE,
    VOCAB,
    finish,
    grouped,
    interleave,
    make_tensors,
    pack,
    patched,
    plain,
    shape_of,
    start_writer,
    write_folder,
    write_gguf,
)
from llama_cpp_logits import GELU_MARGIN, llama_cpp_logits
from tiny_models import built, chain, checkpoint_of, hf_logits, hf_model, logits


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_tensors_equal_the_converted_ones(family: str, tmp_path: Path) -> None:
    tensors = make_tensors(family)
    write_gguf(tmp_path / "tiny.gguf", family, tensors)
    checkpoint = load_checkpoint(tmp_path / "tiny.gguf")
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        found = plain(checkpoint.tensors[name])
        if family.startswith("gemma") and name.endswith("norm.weight"):
            # Adding 1 and subtracting it rounds small numbers, by at most half a unit of 1.
            assert np.allclose(found, tensor, rtol=0, atol=2.5e-7), name
        else:
            assert np.array_equal(found, tensor), name


def test_interleaved_rows_are_reordered(tmp_path: Path) -> None:
    tensors = make_tensors("llama")
    write_gguf(tmp_path / "tiny.gguf", "llama", tensors)
    wrong = dict(tensors)
    name = "model.layers.0.self_attn.k_proj.weight"
    wrong[name] = interleave(tensors[name], KV)
    found = plain(load_checkpoint(tmp_path / "tiny.gguf").tensors[name])
    assert np.array_equal(found, tensors[name])
    assert not np.array_equal(found, wrong[name])


TOKENS = [(7 * i + 3) % 131 for i in range(20)]


def converted(family: str, path: Path) -> Any:
    """Write the file of a family; returns the model of `transformers`."""
    prefix, settings = CLASSES[family]
    original = hf_model(prefix, **{"rope_parameters": ROPE, **settings})
    sizes = original.config.to_dict()
    sizes["head_dim"] = settings.get("head_dim", sizes["hidden_size"] // 4)
    tensors = checkpoint_of(original).tensors
    if sizes["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    write_gguf(path, family, tensors, sizes=sizes)
    return original


@pytest.mark.parametrize("family", CLASSES)
def test_gguf_logits_equal_those_of_llama_cpp(family: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    converted(family, path)
    found = logits(built(load_checkpoint(path)), chain(TOKENS))
    margin = GELU_MARGIN if family.startswith("gemma") else 1e-4
    assert np.abs(found - llama_cpp_logits(path, TOKENS)).max() < margin


@pytest.mark.parametrize("family", CLASSES)
def test_gguf_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    original = converted(family, tmp_path / "tiny.gguf")
    checkpoint = load_checkpoint(tmp_path / "tiny.gguf")
    tokens = TOKENS
    expected = hf_logits(original, tokens)
    found = logits(built(checkpoint), chain(tokens))
    assert np.allclose(found, expected, atol=1e-4)
    # Negative control: half of theta changes the logits.
    checkpoint.config["rope_theta"] = 2500.0
    wrong = logits(built(checkpoint), chain(tokens))
    assert not np.allclose(wrong, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["GPT2", "GPTNeoX", "GPTJ", "Falcon", "Starcoder2"])
def test_other_layouts_are_opened_from_folders(family: str, tmp_path: Path) -> None:
    rotary = {"rotary_dim": 8} if family == "GPTJ" else {}
    model = hf_model(family, hidden_size=64, **rotary)
    model.save_pretrained(tmp_path)
    if family == "GPT2":  # the first checkpoints have no prefix, and a buffer per layer
        tensors = load_file(tmp_path / "model.safetensors")
        tensors = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        tensors["h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.float32)
        save_file(tensors, tmp_path / "model.safetensors")
    found = logits(built(load_checkpoint(tmp_path)), chain([5, 7, 9, 11]))
    assert np.array_equal(found, logits(built(checkpoint_of(model)), chain([5, 7, 9, 11])))


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0", "Q4_1", "BF16", "F16"])
def test_packed_weights_stay_packed(format: str, tmp_path: Path) -> None:
    tensors = make_tensors("llama", tied=True)
    write_gguf(tmp_path / "tiny.gguf", "llama", tensors, format)
    checkpoint = load_checkpoint(tmp_path / "tiny.gguf")
    assert checkpoint.config["tie_word_embeddings"] is True
    kind = gguf.GGMLQuantizationType[format]
    for name, tensor in tensors.items():
        found = checkpoint.tensors[name]
        if tensor.ndim == 2:
            packed = format not in ("BF16", "F16")
            assert isinstance(found, Weight) == packed
            if isinstance(found, Weight):
                assert (found.format, found.name) == (format, name.removesuffix(".weight"))
            once = gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
            assert np.array_equal(plain(found), once)


def test_weights_are_mapped_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3", make_tensors("qwen3"), "Q8_0")
    checkpoint = load_checkpoint(path)
    name = "model.layers.1.mlp.up_proj.weight"
    first, second = checkpoint.tensors[name], checkpoint.tensors[name]
    assert isinstance(first, Weight) and isinstance(second, Weight)
    assert first.data.ctypes.data == second.data.ctypes.data


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_metadata_become_a_config(family: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", family, make_tensors(family))
    config = load_checkpoint(tmp_path / "tiny.gguf").config
    common = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD,
        "max_position_embeddings": 256,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    for key, value in {**common, **CONFIGS[family]}.items():
        assert config[key] == value, key
    assert config["rms_norm_eps"] == pytest.approx(1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_stacked_experts_are_split(family: str, tmp_path: Path) -> None:
    writer = start_writer(tmp_path / "tiny.gguf", family)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(INNER)
    base = FAMILIES["qwen3" if family == "qwen3moe" else "llama"]
    generator = np.random.default_rng(0)
    stacked: dict[str, np.ndarray] = {}

    def add(name: str, shape: tuple[int, ...], format: str = "F32") -> None:
        stacked[name] = generator.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType[format]
        writer.add_tensor(name, gguf.quants.quantize(stacked[name], kind), raw_dtype=kind)

    add("token_embd.weight", (VOCAB, HIDDEN))
    add("output_norm.weight", (HIDDEN,))
    for layer in range(LAYERS):
        for module, target in base.items():
            if not module.startswith("mlp."):
                add(f"blk.{layer}.{target}.weight", shape_of(module, family))
        add(f"blk.{layer}.ffn_gate_inp.weight", (EXPERTS, HIDDEN))
        add(f"blk.{layer}.ffn_gate_exps.weight", (EXPERTS, INNER, HIDDEN), "Q8_0")
        add(f"blk.{layer}.ffn_up_exps.weight", (EXPERTS, INNER, HIDDEN), "Q8_0")
        add(f"blk.{layer}.ffn_down_exps.weight", (EXPERTS, HIDDEN, INNER), "Q8_0")
    finish(writer)
    checkpoint = load_checkpoint(tmp_path / "tiny.gguf")
    router, down = {
        "llama": ("block_sparse_moe.gate", "block_sparse_moe.experts.3.w2"),
        "qwen3moe": ("mlp.gate", "mlp.experts.3.down_proj"),
    }[family]
    assert checkpoint.config["num_experts_per_tok"] == 2
    assert checkpoint.config["model_type"] == {"llama": "mixtral", "qwen3moe": "qwen3_moe"}[family]
    gate = plain(checkpoint.tensors[f"model.layers.1.{router}.weight"])
    assert np.array_equal(gate, stacked["blk.1.ffn_gate_inp.weight"])
    expert = checkpoint.tensors[f"model.layers.2.{down}.weight"]
    assert isinstance(expert, Weight)
    assert (expert.format, expert.name) == ("Q8_0", f"model.layers.2.{down}")
    whole = stacked["blk.2.ffn_down_exps.weight"]
    assert np.abs(plain(expert) - whole[3]).max() < 0.02
    assert np.abs(plain(expert) - whole[2]).max() > 1


def test_rope_factors_reach_the_config(tmp_path: Path) -> None:
    writer = start_writer(tmp_path / "tiny.gguf", "llama")
    tensors = make_tensors("llama")
    factors = np.linspace(1, 8, HEAD // 2).astype(np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    for name, tensor in tensors.items():
        if name in OUTER:
            writer.add_tensor(OUTER[name], tensor)
            continue
        _, _, layer, module, _ = (
            name.replace("self_attn.", "self_attn#").replace("mlp.", "mlp#").split(".")
        )
        target = FAMILIES["llama"][module.replace("#", ".")]
        writer.add_tensor(f"blk.{layer}.{target}.weight", tensor)
    finish(writer)
    scaling = load_checkpoint(tmp_path / "tiny.gguf").config["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"] == factors.tolist()
    assert scaling["attention_factor"] == 1.0


def test_truncated_files_raise_one_line_errors(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", make_tensors("llama"), "Q4_1")
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    lengths = [0, 1, 3, 4, 7, 8, 20, 100, 500, 1500, 3000, len(whole) // 2, len(whole) - 33]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(cut)
        assert str(cut) in str(caught.value) and "\n" not in str(caught.value)


def test_random_corruption_raises_checkpoint_errors_only(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", make_tensors("llama"), "Q4_1")
    whole = path.read_bytes()
    header = whole.index(b"blk.2.ffn_down.weight") + 80
    generator = random.Random(0)
    damaged = tmp_path / "damaged.gguf"
    num_rejected = 0
    for _ in range(250):
        content = bytearray(whole)
        for _ in range(generator.choice((1, 1, 2, 8))):
            content[generator.randrange(header)] = generator.choice(
                (0, 1, 255, generator.randrange(256))
            )
        damaged.write_bytes(content)
        try:
            checkpoint = load_checkpoint(damaged)
            for name in checkpoint.tensors:
                checkpoint.tensors[name]
        except CheckpointError as error:
            num_rejected += 1
            assert "\n" not in str(error)
    assert num_rejected > 50


def test_errors_of_unsupported_files(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", make_tensors("llama"))
    whole = path.read_bytes()

    def message(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path)
        return str(caught.value)

    assert "not a GGUF file" in message(b"GGML" + whole[4:])
    assert "version 9" in message(whole[:4] + struct.pack("<I", 9) + whole[8:])
    assert "big-endian" in message(whole[:4] + struct.pack(">I", 3) + whole[8:])
    unknown = message(
        patched(whole, struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"xlama")
    )
    assert "architecture 'xlama' is not supported (" in unknown and "transformers has" in unknown
    name = b"blk.0.ffn_up.weight"
    assert "not part of the llama models" in message(patched(whole, name, b"blk.0.ffn_xx.weight"))
    position = whole.index(name) + len(name) + 4 + 16
    odd = whole[:position] + struct.pack("<I", 9) + whole[position + 4 :]
    assert "'blk.0.ffn_up.weight' in format Q8_1" in message(odd)


def test_missing_tensors_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    tensors = make_tensors("qwen3")
    less = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up" not in name}
    write_gguf(tmp_path / "less.gguf", "qwen3", less)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight' is missing"):
        load_checkpoint(tmp_path / "less.gguf")
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((HEAD, HIDDEN), np.float32)
    write_gguf(tmp_path / "odd.gguf", "qwen3", tensors)
    with pytest.raises(CheckpointError, match=r"k_proj.weight' has shape \[16, 64\]"):
        load_checkpoint(tmp_path / "odd.gguf")


def test_a_folder_is_read_lazily_and_exactly(tmp_path: Path) -> None:
    tensors = {name: t.astype(DTYPES["BF16"]) for name, t in make_tensors("llama").items()}
    folder = write_folder(tmp_path / "m", tensors, hidden_size=HIDDEN)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = load_checkpoint(folder)
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.config["hidden_size"] == HIDDEN
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        found = checkpoint.tensors[name]
        assert found.dtype == tensor.dtype and np.array_equal(found, tensor), name
    assert "nothing" not in checkpoint.tensors
    assert checkpoint.tensors.get("nothing") is None
    with pytest.raises(CheckpointError, match="has no tensor 'nothing'"):
        checkpoint.tensors["nothing"]


def test_shards_are_joined_and_missing_ones_named(tmp_path: Path) -> None:
    first, second = np.arange(12.0).reshape(3, 4), np.arange(5, dtype=np.float16)
    save_file({"a": first}, tmp_path / "model-1.safetensors")
    save_file({"b": second}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_checkpoint(tmp_path).tensors
    assert np.array_equal(tensors["a"], first) and np.array_equal(tensors["b"], second)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match="shard model-2.safetensors is missing"):
        load_checkpoint(tmp_path)
    index["weight_map"]["b"] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="unsafe"):
        load_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3), "b": np.zeros(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.ones(2)}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="'b' is in both model-1.*and model-2.*") as error:
        load_checkpoint(tmp_path)
    assert "\n" not in str(error.value)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="'b' is in both model-1.*and model-2.*"):
        load_checkpoint(tmp_path)


def test_a_missing_shard_is_named_without_an_index(tmp_path: Path) -> None:
    for number in (1, 3):
        save_file(
            {f"t{number}": np.zeros(2)}, tmp_path / f"model-0000{number}-of-00003.safetensors"
        )
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors is missing") as one:
        load_checkpoint(tmp_path)
    assert "\n" not in str(one.value)
    save_file({"t2": np.ones(2)}, tmp_path / "model-00002-of-00003.safetensors")
    assert set(load_checkpoint(tmp_path).tensors) == {"t1", "t2", "t3"}


@pytest.mark.parametrize("weights", [None, "pytorch_model.bin"])
def test_a_model_that_is_not_supported_is_refused_before_its_files_are_missed(
    tmp_path: Path, weights: str | None
) -> None:
    """One line names the model, what is supported and whether `transformers` has it."""
    pytest.importorskip("transformers")
    if weights is not None:
        (tmp_path / weights).write_bytes(b"x")
    for model_type, name, hint in (
        ("ctrl", "CTRLLMHeadModel", "(--backend transformers)"),
        ("t5", "T5ForConditionalGeneration", "no causal model of this type either"),
    ):
        config = {"model_type": model_type, "architectures": [name]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        message = rf"'{model_type}' \({name}\) is not supported; .*supported are the"
        with pytest.raises(CheckpointError, match=message) as error:
            load_checkpoint(tmp_path)
        assert hint in str(error.value) and "\n" not in str(error.value)
    for config in ({"model_type": "new", "architectures": ["NewModel"]}, {"hidden_size": 8}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="no safetensors files|only pickled"):
            load_checkpoint(tmp_path)


def test_errors_of_broken_folders(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {"a": np.ones((64, 64))})
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[:-100], whole[:5], b"\xff" * 64, whole[:40]):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="truncated or corrupt"):
            load_checkpoint(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match="no safetensors files"):
        load_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="pickled"):
        load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="pickled"):
        load_checkpoint(folder / "pytorch_model.bin")
    (folder / "config.json").write_text("{not json")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no config.json"):
        load_checkpoint(folder)
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        load_checkpoint(str(tmp_path / "nowhere.gguf"))


def test_language_model_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    tensors = {
        "language_model.model.embed_tokens.weight": np.ones((4, 8), np.float32),
        "language_model.lm_head.weight": np.ones((4, 8), np.float32),
        "vision_tower.patch.weight": np.ones((2, 2), np.float32),
    }
    text = {"model_type": "gemma3_text", "hidden_size": 8}
    folder = write_folder(tmp_path / "m", tensors, text_config=text, eos_token_id=[1])
    checkpoint = load_checkpoint(folder)
    config = checkpoint.config  # with defaults of Gemma's class, which such files leave out
    assert {name: config[name] for name in text} == text and config["eos_token_id"] == [1]
    assert config["num_attention_heads"] == 8 and config["num_hidden_layers"] == 26
    assert set(checkpoint.tensors) == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(("bits", "centred", "act_order", "format"), GPTQ_CASES)
def test_gptq(
    bits: int, centred: bool, act_order: bool, format: str, version: str, tmp_path: Path
) -> None:
    codes, scales, zeros, groups, exact = grouped(bits, centred, act_order)
    tensors = {
        "model.x.qweight": pack(codes, bits, 0),
        "model.x.qzeros": pack(zeros - int(version == "gptq"), bits, 1),
        "model.x.scales": scales,
        "model.x.g_idx": groups.astype(np.int32),
        "model.x.bias": np.ones(24, np.float32),
    }
    settings = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}
    checkpoint = load_checkpoint(
        write_folder(tmp_path / "m", tensors, quantization_config=settings)
    )
    assert set(checkpoint.tensors) == {"model.x.weight", "model.x.bias"}
    weight = checkpoint.tensors["model.x.weight"]
    assert isinstance(weight, Weight)
    assert (weight.format, weight.name) == (format, "model.x")
    error = np.abs(dequantize(weight) - exact)
    step = scales.max().astype(np.float64)
    if format in ("Q4_0", "Q8_0"):
        assert error.max() < 1e-6 * step
    else:
        assert (error / step).max() < (0.0074 if bits == 4 else 0.125)


def test_scales_that_float16_cannot_hold_are_not_rounded(tmp_path: Path) -> None:
    codes, scales, zeros, groups, exact = grouped(4, centred=True)
    settings = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}
    for factor, format in ((1.0, "Q4_0"), (1.0002, "F16")):
        tensors = {
            "x.qweight": pack(codes, 4, 0),
            "x.qzeros": pack(zeros, 4, 1),
            "x.scales": scales.astype(np.float32) * np.float32(factor),
            "x.g_idx": groups.astype(np.int32),
        }
        folder = write_folder(tmp_path / format, tensors, quantization_config=settings)
        weight = load_checkpoint(folder).tensors["x.weight"]
        assert isinstance(weight, Weight) and weight.format == format
        expected = exact * factor
        # Each weight is rounded, by at most 1 part in 2048.
        error = np.abs(dequantize(weight).astype(np.float64) - expected)
        assert (error <= np.abs(expected) / 2048).all()


def test_awq(tmp_path: Path) -> None:
    codes, scales, zeros, _, exact = grouped(4, centred=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    settings = {"quant_method": "awq", "bits": 4, "version": "gemm"}

    def load(positions: tuple[int, ...]) -> Weight:
        tensors = {
            "y.qweight": pack(codes, 4, 1, positions),
            "y.qzeros": pack(zeros, 4, 1, positions),
            "y.scales": scales,
        }
        folder = write_folder(tmp_path / "m", tensors, quantization_config=settings)
        weight = load_checkpoint(folder).tensors["y.weight"]
        assert isinstance(weight, Weight) and weight.format == "Q4_1"
        return weight

    step = scales.max().astype(np.float64)
    assert (np.abs(dequantize(load(order)) - exact) / step).max() < 0.0074
    # Negative control: in the plain order the same words give other columns.
    wrong = dequantize(load(tuple(range(8))))
    assert (np.abs(wrong - exact) / step).max() > 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "eetq"}, "'eetq' are not supported"),
        (
            {"quant_method": "fp8", "fmt": "e5m2"},
            "FP8 of format 'e5m2' with weight_block_size None",
        ),
        ({"quant_method": "gptq", "bits": 5}, "5 bits"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' is not supported; supported are gptq and gptq_v2",
        ),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "format 'marlin'"),
        ({"quant_method": "awq", "bits": 3}, "3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "marlin layout"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "group_size is None"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:fp8"},
            "packing_format 'auto_round:fp8' is not supported; supported are auto_round:auto_gptq",
        ),
    ],
)
def test_unsupported_quantisations_are_rejected(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "m", {"a": np.zeros(2)}, quantization_config=settings)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_inconsistent_quantised_parts_are_rejected(tmp_path: Path) -> None:
    codes, scales, zeros, groups, _ = grouped(4, True)
    tensors = {
        "x.qweight": pack(codes, 4, 0),
        "x.qzeros": pack(zeros - 1, 4, 1),
        "x.scales": scales,
        "x.g_idx": (groups + 5).astype(np.int32),
    }
    settings = {"quant_method": "gptq", "bits": 4}
    folder = write_folder(tmp_path / "m", tensors, quantization_config=settings)
    with pytest.raises(CheckpointError, match="do not fit together"):
        load_checkpoint(folder).tensors["x.weight"]
