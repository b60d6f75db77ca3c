"""FP8 weights with a scale per block, as DeepSeek-V3 is published."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e8m0fnu
from safetensors.numpy import save_file

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
from anydecode.models.loading import fp8, load_checkpoint
from tiny_models import built, chain, checkpoint_of, hf_logits, hf_model, logits

BLOCK = [16, 32]
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK}
PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42]


def packed(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers and scales of a matrix, block by block."""
    rows, columns = matrix.shape
    codes = np.empty(matrix.shape, float8_e4m3fn)
    scales = np.empty((-(-rows // BLOCK[0]), -(-columns // BLOCK[1])), np.float32)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * BLOCK[0] : (i + 1) * BLOCK[0], j * BLOCK[1] : (j + 1) * BLOCK[1]]
        scales[i, j] = np.abs(matrix[part]).max() / 448
        codes[part] = (matrix[part] / scales[i, j]).astype(float8_e4m3fn)
    return codes, scales


def unpacked(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    factors = scales.repeat(BLOCK[0], 0).repeat(BLOCK[1], 1)[: codes.shape[0], : codes.shape[1]]
    return (codes.astype(np.float32) * factors).astype(bfloat16).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, float8_e8m0fnu])
def test_blocks_at_the_edges(dtype: Any) -> None:
    """DeepSeek-V3 stores scales in float32, Qwen3 in bfloat16, others powers of two."""
    codes, exact = packed(np.random.default_rng(0).standard_normal((37, 70), np.float32))
    scales = exact.astype(dtype)
    tensors: dict[str, np.ndarray] = {"x.weight": codes, "x.weight_scale_inv": scales}
    weight = fp8.read(tensors.__getitem__, tensors.__contains__, "x", SETTINGS)
    assert weight.format == "BF16"
    assert np.array_equal(dequantize(weight), unpacked(codes, scales.astype(np.float32)))


def test_blocks_of_shards() -> None:
    """In MiMo-V2.5 each shard of queries, keys and values has blocks of its own. Wrong twin: blocks
    that go on from one shard to the next."""
    matrix = np.random.default_rng(0).standard_normal((3 * 37, 70), np.float32)
    shards = [packed(part) for part in np.split(matrix, 3)]
    codes, scales = (np.concatenate(parts) for parts in zip(*shards, strict=True))
    name, settings = "x.qkv_proj", {**SETTINGS, "qkv_shards": 3}
    tensors: dict[str, np.ndarray] = {
        f"{name}.weight": codes,
        f"{name}.weight_scale_inv": scales,
        "x.o_proj.weight": codes,
        "x.o_proj.weight_scale_inv": scales,
    }
    read = partial(fp8.read, tensors.__getitem__, tensors.__contains__)
    found = dequantize(read(name, settings))
    assert np.array_equal(found, np.concatenate([unpacked(*shard) for shard in shards]))
    assert not np.array_equal(found, unpacked(codes, scales))
    for module, wrong in (
        (name, SETTINGS),
        ("x.o_proj", settings),
        (name, {**settings, "qkv_shards": 2}),
    ):
        with pytest.raises(CheckpointError, match="in blocks of"):
            read(module, wrong)


def test_a_folder_of_deepseek(tmp_path: Path) -> None:
    """The matrix of keys and values is split by head after it was read."""
    torch = pytest.importorskip("torch")

    model = hf_model(
        "DeepseekV3",
        kv_lora_rank=40,
        q_lora_rank=24,
        qk_nope_head_dim=10,
        qk_rope_head_dim=8,
        v_head_dim=12,
        num_key_value_heads=4,
        first_k_dense_replace=3,
    )
    stored = checkpoint_of(model)
    tensors = {}
    for name, tensor in stored.tensors.items():
        tensors[name] = np.ascontiguousarray(tensor)
        if "_proj" in name:
            codes, scales = packed(tensor)
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            with torch.no_grad():
                values = torch.from_numpy(unpacked(codes, scales))
                model.get_parameter(name).copy_(values)
    save_file(tensors, tmp_path / "model.safetensors")
    config: dict[str, Any] = {**stored.config, "quantization_config": SETTINGS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = logits(built(load_checkpoint(tmp_path)), chain(PROMPT))
    assert np.abs(found - hf_logits(model, PROMPT)).max() < 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_block_size": 128}, "weight_block_size 128"),
        ({"weight_block_size": [128]}, "is not supported"),
        ({"weight_block_size": [0, 128]}, "weight_block_size is 0; allowed is"),
        ({"fmt": "e5m2"}, "format 'e5m2'"),
    ],
)
def test_unsupported_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        fp8.layouts({**SETTINGS, **settings}, "folder")


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (np.zeros((32, 64), np.uint8), np.ones((2, 2), np.float32)),
        (np.zeros((32, 64), float8_e4m3fn), np.ones((2, 3), np.float32)),
        (np.zeros((32, 64), float8_e4m3fn), np.ones((2, 2), np.int32)),
        (np.zeros((32, 64, 1), float8_e4m3fn), np.ones((2, 2), np.float32)),
        (np.zeros((0, 64), float8_e4m3fn), np.ones((0, 2), np.float32)),
    ],
)
def test_parts_that_do_not_fit(codes: np.ndarray, scales: np.ndarray) -> None:
    tensors = {"x.weight": codes, "x.weight_scale_inv": scales}
    with pytest.raises(CheckpointError, match="parts of 'x' do not fit together"):
        fp8.read(tensors.__getitem__, tensors.__contains__, "x", SETTINGS)


def test_a_scale_that_is_no_number() -> None:
    codes, scales = packed(np.ones((32, 64), np.float32))
    scales[1, 1] = np.nan
    tensors = {"x.weight": codes, "x.weight_scale_inv": scales}
    with pytest.raises(CheckpointError, match="a scale of 'x' is not finite"):
        fp8.read(tensors.__getitem__, tensors.__contains__, "x", SETTINGS)
