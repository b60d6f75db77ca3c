"""Folders in the layouts of the tools that quantise weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fuzz.layouts import LAYER, MATRICES, SIZES, Tensors, random_tensors, shapes_of
from gguf_models import pack, write_folder
from quantized_parts import CASES, Case


def _quantized(write: Callable[[np.ndarray], Tensors]) -> Tensors:
    """A Llama of one layer; `write` gives the parts of its matrices."""
    tensors = random_tensors(shapes_of(({n: s for n, s in LAYER.items() if "_proj" not in n},)))
    generator = np.random.default_rng(1)
    for name, shape in MATRICES.items():
        matrix = 0.1 * generator.standard_normal(shape, np.float32)
        parts = write(matrix)
        tensors |= {f"model.layers.0.{name}.{part}": array for part, array in parts.items()}
    return tensors


def _gptq(matrix: np.ndarray) -> Tensors:
    codes = _codes(matrix)
    groups = np.arange(len(codes), dtype=np.int32) // 32
    return {"qweight": pack(codes, 4, 0), "g_idx": groups, **_grouped(codes, tuple(range(8)))}


def _awq(matrix: np.ndarray) -> Tensors:
    codes, order = _codes(matrix), (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": pack(codes, 4, 1, order), **_grouped(codes, order)}


def _codes(matrix: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(matrix.T * 20 + 8), 0, 15).astype(np.int64)


def _grouped(codes: np.ndarray, order: tuple[int, ...]) -> Tensors:
    shape = (len(codes) // 32, codes.shape[1])
    return {
        "qzeros": pack(np.full(shape, 7), 4, 1, order),
        "scales": np.full(shape, 0.05, np.float16),
    }


def _block_fp8(matrix: np.ndarray) -> Tensors:
    parts, _ = CASES["fp8, blocks"].write(matrix, kind="block")
    return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"]}


_TOOLS: dict[str, tuple[Callable[[np.ndarray], Tensors], dict[str, Any]]] = {
    "gptq": (
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"},
    ),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "fp8": (
        _block_fp8,
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    ),
}
#: The kind of a tensor of torchao, by the type of its numbers.
_KINDS = {"int8": "IntxUnpackedToInt8Tensor", "float8_e4m3fn": "Float8Tensor"}


def _write_case(folder: Path, case: Case) -> Path:
    """A folder in the layout of a case of `quantized_parts`."""
    tensors = _quantized(lambda matrix: case.write(matrix, **case.options)[0])
    config, method = {**SIZES, "num_hidden_layers": 1}, case.settings["quant_method"]
    if method != "modelopt":
        config["quantization_config"] = case.settings
    write_folder(folder, tensors, **config)
    if method == "modelopt":
        content = {"producer": {"name": "modelopt"}, "quantization": case.settings}
        (folder / "hf_quant_config.json").write_text(json.dumps(content))
    if method == "torchao":
        names = [name for name in tensors if "_weight_" not in name]
        header = {name: json.dumps({"_type": "Tensor"}) for name in names}
        for name, array in tensors.items():
            if name.endswith("_weight_qdata"):
                kind = {
                    "_type": _KINDS[array.dtype.name],
                    "_data": {"dtype": {"_type": "torch.dtype", "_data": "bfloat16"}},
                }
                header[name.replace("_weight_qdata", "weight")] = json.dumps(kind)
        header["tensor_names"] = json.dumps(list(header))
        save_file(tensors, folder / "model.safetensors", header)
    return folder


def write_quantized(root: Path) -> dict[str, Path]:
    """Write a folder of every layout; the folders by name."""
    folders = {name: _write_case(root / name, case) for name, case in CASES.items()}
    for name, (write, settings) in _TOOLS.items():
        config = {**SIZES, "num_hidden_layers": 1, "quantization_config": settings}
        folders[name] = write_folder(root / name, _quantized(write), **config)
    return folders
