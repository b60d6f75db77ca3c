"""NVFP4 in the layouts of ModelOpt and compressed-tensors, and in GGUF with a factor per tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import float4_e2m1fn, float8_e4m3fn

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from gguf_models import make_tensors, write_folder, write_gguf

FACTOR = np.float32(0.037)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


def parts(rows: int = 5, columns: int = 128) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two numbers per byte, their scales, and the values by the types of `ml_dtypes`."""
    generator = np.random.default_rng(3)
    codes = generator.integers(0, 256, (rows, columns // 2), np.uint8)
    scales = generator.integers(0, 127, (rows, columns // 16), np.uint8).view(float8_e4m3fn)
    pairs = np.stack((codes & 15, codes >> 4), -1).reshape(rows, -1)
    numbers = pairs.view(float4_e2m1fn).astype(np.float32).reshape(rows, -1, 16)
    values = numbers * scales.astype(np.float32)[..., None]
    return codes, scales, values.reshape(rows, columns) * FACTOR


def modelopt(codes: np.ndarray, scales: np.ndarray) -> dict[str, Any]:
    return {
        "model.x.weight": codes,
        "model.x.weight_scale": scales,
        "model.x.weight_scale_2": np.array(FACTOR),
        "model.x.input_scale": np.array(FACTOR),
        "model.y.weight": np.ones((2, 3), np.float32),
    }


def compressed(codes: np.ndarray, scales: np.ndarray) -> dict[str, Any]:
    return {
        "model.x.weight_packed": codes,
        "model.x.weight_scale": scales,
        "model.x.weight_global_scale": np.array([1 / FACTOR], np.float32),
        "model.x.input_global_scale": np.array([FACTOR]),
        "model.y.weight": np.ones((2, 3), np.float32),
    }


def check(folder: Path, expected: np.ndarray) -> None:
    tensors = load_checkpoint(folder).tensors
    assert set(tensors) == {"model.x.weight", "model.y.weight"}
    weight = tensors["model.x.weight"]
    assert isinstance(weight, Weight) and weight.format == "NVFP4"
    assert weight.num_bytes == expected.size * 36 // 64
    np.testing.assert_allclose(dequantize(weight), expected, rtol=3e-7)
    assert isinstance(tensors["model.y.weight"], np.ndarray)


@pytest.mark.parametrize(("settings", "layout"), [(MODELOPT, modelopt), (COMPRESSED, compressed)])
def test_safetensors(settings: dict[str, str], layout: Any, tmp_path: Path) -> None:
    codes, scales, values = parts()
    folder = write_folder(tmp_path / "m", layout(codes, scales), quantization_config=settings)
    check(folder, values)


def test_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    codes, scales, values = parts()
    folder = write_folder(tmp_path / "m", modelopt(codes, scales))
    settings = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(settings))
    check(folder, values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": np.zeros((5, 48), np.uint8)}, "do not fit together"),
        ({"weight": np.zeros((5, 64), np.int8)}, "do not fit together"),
        ({"weight_scale": np.zeros((5, 8), np.float32)}, "do not fit together"),
        (
            {"weight": np.zeros((5, 48), np.uint8), "weight_scale": np.zeros((5, 6), np.uint8)},
            "needs a multiple of 64",
        ),
        ({"weight_scale": np.full((5, 8), 255, np.uint8)}, "negative or no number"),
        ({"weight_scale_2": np.zeros((), np.float32)}, "not one positive float32"),
        ({"weight_scale_2": np.ones(2, np.float32)}, "not one positive float32"),
        ({"weight_scale_2": np.array(np.inf, np.float32)}, "not one positive float32"),
    ],
)
def test_wrong_parts_are_refused_in_one_line(
    changes: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    codes, scales, _ = parts()
    tensors = modelopt(codes, scales)
    for part, array in changes.items():
        is_byte_scale = part == "weight_scale" and array.dtype == np.uint8
        tensors[f"model.x.{part}"] = array.view(float8_e4m3fn) if is_byte_scale else array
    folder = write_folder(tmp_path / "m", tensors, quantization_config=MODELOPT)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(folder).tensors["model.x.weight"]
    assert "\n" not in str(caught.value) and "model.x" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "ModelOpt with quant_algo 'W4A8_AWQ'"),
        ({**COMPRESSED, "format": "marlin-24"}, "with format 'marlin-24'.*nvfp4-pack"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, str], message: str, tmp_path: Path) -> None:
    codes, scales, _ = parts()
    folder = write_folder(tmp_path / "m", modelopt(codes, scales), quantization_config=settings)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_a_factor_of_a_gguf_tensor_multiplies_its_weight(tmp_path: Path) -> None:
    """Weights of any format; the factor of activations is not used."""
    tensors = make_tensors("llama")
    halved = {
        name: tensor / 2 if name.endswith(("up_proj.weight", "q_proj.weight")) else tensor
        for name, tensor in tensors.items()
    }
    networks = []
    for format in ("F32", "Q8_0"):
        plain, scaled = tmp_path / f"plain-{format}.gguf", tmp_path / f"scaled-{format}.gguf"
        write_gguf(plain, "llama", tensors, format)
        write_gguf(scaled, "llama", halved, format, factors={"attn_q": 2.0, "ffn_up": 2.0})
        networks.append([load_network(load_checkpoint(path)) for path in (plain, scaled)])
    for one, other in networks:
        for layer, twin in zip(one.weights.layers, other.weights.layers, strict=True):
            for weight, same in ((layer.query, twin.query), (layer.mlp.up, twin.mlp.up)):
                assert np.array_equal(dequantize(weight.weight), dequantize(same.weight))


def test_a_wrong_factor_of_a_gguf_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", make_tensors("llama"), factors={"ffn_up": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.scale' is F32 of shape \[2\], not"):
        load_network(load_checkpoint(path))
