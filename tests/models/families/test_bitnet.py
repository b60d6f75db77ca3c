"""BitNet b1.58 in the layouts of its repositories: codes or the numbers that they are rounded from
in safetensors, and the format of its own program in GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
from anydecode.models.loading import load_checkpoint
from gguf_models import finish, usual_metadata, writer_with
from tiny_models import built, chain, hf_logits, hf_model, logits

TOKENS = [(7 * i + 3) % 131 for i in range(24)]
#: Sizes that blocks of 256 divide, and one that they do not.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}


def ternary(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    """The codes -1, 0 and 1 and the factor of the paper."""
    factor = float(np.abs(matrix).mean())
    return np.clip(np.round(matrix / factor), -1, 1).astype(np.int8), factor


def original(**settings: Any) -> tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A model whose projections are rounded, their numbers before, and the others' tensors."""
    torch = pytest.importorskip("torch")

    model = hf_model("BitNet", **{**SIZES, **settings})
    before, others = {}, {}
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if name.endswith("_proj.weight"):
                before[name] = parameter.numpy().copy()
                codes, factor = ternary(before[name])
                parameter.copy_(torch.from_numpy(codes * np.float32(factor)))
            elif name != "lm_head.weight":
                others[name] = parameter.numpy()
    return model, before, others


def write(folder: Path, tensors: dict[str, np.ndarray], model: Any, **settings: Any) -> Path:
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "bitnet"}}
    config["quantization_config"].update(settings)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def packed(matrix: np.ndarray, is_factor: bool) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the four quarters of the rows, and the scale."""
    codes, factor = ternary(matrix)
    quarters = np.split((codes + 1).astype(np.uint8), 4)
    words = sum(quarter << 2 * i for i, quarter in enumerate(quarters))
    return words, np.array([factor if is_factor else 1 / factor], np.float32)


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_codes_give_the_logits_of_the_rounded_model(kind: str, tmp_path: Path) -> None:
    model, before, tensors = original()
    for name, matrix in before.items():
        words, scale = packed(matrix, kind == "autobitlinear")
        tensors |= {name: words, f"{name}_scale": scale}
    path = write(tmp_path, tensors, model, linear_class=kind, quantization_mode="offline")
    ours = built(load_checkpoint(path))
    formats = {weight.format for weight in ours.network.weights.layers[1].matrices}
    assert formats == {"TQ2_0"}
    expected = hf_logits(model, TOKENS)
    assert np.abs(logits(ours, chain(TOKENS)) - expected).max() < 1e-4
    other = {"bitlinear": "autobitlinear", "autobitlinear": "bitlinear"}[kind]
    path = write(tmp_path, tensors, model, linear_class=other)
    wrong = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(wrong - expected).max() > 1e-2


@pytest.mark.parametrize("size", [512, 80])
def test_numbers_are_rounded_when_they_are_read(size: int, tmp_path: Path) -> None:
    """Those of 80 inputs do not divide into blocks of 256 and become plain numbers."""
    model, before, tensors = original(intermediate_size=size)
    path = write(tmp_path, {**tensors, **before}, model, quantization_mode="online")
    checkpoint = load_checkpoint(path)
    ours = built(checkpoint)
    down = ours.network.weights.layers[0].mlp.down.weight
    assert down.format == ("F32" if size % 256 else "TQ2_0")
    expected = hf_logits(model, TOKENS)
    assert np.abs(logits(ours, chain(TOKENS)) - expected).max() < 1e-4
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    plain = logits(built(load_checkpoint(path)), chain(TOKENS))
    assert np.abs(plain - expected).max() > 1e-2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"linear_class": "x"}, "linear_class 'x'"),
        ({"quantization_mode": "later"}, "quantization_mode 'later'"),
        ({"use_rms_norm": True}, "use_rms_norm True is not supported"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    model, before, tensors = original()
    path = write(tmp_path, {**tensors, **before}, model, **settings)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda words: words | 3, "codes that are not those"),
        (lambda words: words.astype(np.int16), "int16"),
    ],
)
def test_damaged_codes_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    model, before, tensors = original()
    for name, matrix in before.items():
        words, scale = packed(matrix, is_factor=False)
        tensors |= {name: words, f"{name}_scale": scale}
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = change(tensors[name])
    with pytest.raises(CheckpointError, match=message):
        built(load_checkpoint(write(tmp_path, tensors, model)))


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def i2_s(matrix: np.ndarray) -> np.ndarray:
    """Blocks of 128 codes, of which byte i has the codes i, i + 32, i + 64 and i + 96 from its
    highest bits on, and the factor behind all of them."""
    codes, factor = ternary(matrix)
    fields = (codes + 1).astype(np.uint8).reshape(-1, 4, 32)
    words = sum(fields[:, i] << (6 - 2 * i) for i in range(4))
    end = np.zeros(8, np.float32)
    end[0] = factor
    return np.concatenate([words.ravel(), end.view(np.uint8)])


def write_gguf(path: Path, model: Any, before: dict[str, np.ndarray], **changes: Any) -> Path:
    config = model.config.to_dict()
    metadata = {**usual_metadata(config, 2), "rope.freq_base": 5e5, **changes}
    writer = writer_with(path, "bitnet-b1.58", metadata, 131)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        matrix = before.get(name)
        target = name.replace("model.layers", "blk")
        for usual, other in NAMES.items():
            target = target.replace(f"{usual}.weight", f"{other}.weight")
        if matrix is None:
            writer.add_tensor(target, parameter.numpy())
        else:  # the package does not know the format, whose code stands in its place below
            kind = gguf.GGMLQuantizationType.I8
            writer.add_tensor(target, i2_s(matrix).view(np.int8), matrix.shape, kind)
    finish(writer)
    whole = bytearray(path.read_bytes())
    for name in before:
        target = name.replace("model.layers", "blk")
        for usual, other in NAMES.items():
            target = target.replace(f"{usual}.weight", f"{other}.weight")
        at = whole.index(target.encode()) + len(target) + 4 + 2 * 8
        whole[at : at + 4] = (36).to_bytes(4, "little")
    path.write_bytes(whole)
    return path


def test_the_format_of_its_own_program(tmp_path: Path) -> None:
    model, before, _ = original()
    checkpoint = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", model, before))
    name = "model.layers.1.mlp.down_proj.weight"
    weight, (codes, factor) = checkpoint.tensors[name], ternary(before[name])
    assert weight.format == "TQ2_0"
    assert np.array_equal(dequantize(weight), codes * np.float32(factor))
    found = logits(built(checkpoint), chain(TOKENS))
    assert np.abs(found - hf_logits(model, TOKENS)).max() < 1e-4


def test_a_truncated_file_of_its_own_program_is_refused(tmp_path: Path) -> None:
    model, before, _ = original()
    path = write_gguf(tmp_path / "tiny.gguf", model, before)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="is truncated"):
        load_checkpoint(path)


def test_rows_that_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    model, before, _ = original(hidden_size=128)
    path = write_gguf(tmp_path / "tiny.gguf", model, before)
    with pytest.raises(CheckpointError, match=r"of shape \[128, 128\] in I2_S"):
        load_checkpoint(path)
