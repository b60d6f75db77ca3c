"""Reads torchao's tensors of int8 numbers (of 8 or fewer bits) and of FP8 numbers, with a scale per
output or group of inputs. The header of each safetensors file says which kind a tensor is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES
from anydecode.kernels.interface import Weight
from anydecode.models.loading.layout import Layout
from anydecode.models.loading.scaled import misfit, runs, scaled_weight

#: Kind of tensor -> the type of its numbers.
KINDS = {
    "Int8Tensor": "int8",
    "IntxUnpackedToInt8Tensor": "int8",
    "Float8Tensor": "float8_e4m3fn",
}
_PARTS = ("_weight_qdata", "_weight_scale", "_weight_zero_point")
_TYPES = {"float32": DTYPES["F32"], "float16": DTYPES["F16"], "bfloat16": DTYPES["BF16"]}


def layouts(settings: Mapping[str, Any], path: Path) -> list[Layout]:
    """The only layout. Raises `CheckpointError` for kinds of tensors that are not supported."""
    kinds: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), framework="numpy") as opened:
            kinds |= _kinds(opened.metadata() or {}, file)
    return [Layout("_weight_qdata", _PARTS, partial(_read, kinds=kinds))]


def _kinds(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    """The entry of each tensor of a kind of torchao, by its name."""
    kinds: dict[str, Any] = {}
    for name in json.loads(metadata.get("tensor_names", "[]")):
        entry = json.loads(metadata[name])
        kind = entry.get("_type")
        if kind == "Tensor":
            continue
        if kind not in KINDS:
            raise CheckpointError(
                f"{file}: {name!r} is a {kind} of torchao, which is not supported; supported are"
                f" {', '.join(KINDS)}"
            )
        kinds[name] = entry
    return kinds


def _read(
    get: Callable[[str], np.ndarray],
    has: Callable[[str], bool],
    module: str,
    settings: Any,
    kinds: Mapping[str, Any],
) -> Weight:
    entry = kinds.get(f"{module}.weight")
    if entry is None:
        raise CheckpointError(f"the header of the file does not say what {module!r} is")
    numbers, scales = get(f"{module}._weight_qdata"), get(f"{module}._weight_scale")
    if numbers.ndim != 2 or scales.ndim != 2 or numbers.dtype.name != KINDS[entry["_type"]]:
        raise misfit(module, numbers, scales)
    groups = runs(numbers.shape[1], scales.shape[1], module)
    if has(f"{module}._weight_zero_point"):
        zeros = get(f"{module}._weight_zero_point")
        if zeros.dtype.kind != "i" or zeros.shape != scales.shape:
            raise misfit(module, numbers, scales, zeros)
        numbers = numbers.astype(np.int16) - zeros.astype(np.int16)[:, groups]
    dtype = _TYPES.get(entry["_data"].get("dtype", {}).get("_data"))
    return scaled_weight(numbers, scales, groups, module, dtype)
