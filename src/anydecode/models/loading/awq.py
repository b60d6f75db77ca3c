"""Reads AWQ weights: codes and zero points packed along the outputs, in the interleaved order of
its GEMM kernel (Lin et al., 2023, arXiv:2306.00978, in the layout of AutoAWQ)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight
from anydecode.models.loading.groups import check_parts, grouped_weight, unpack

MARKER = "qweight"
PARTS = ("qweight", "qzeros", "scales")

#: Field i of a 32-bit word holds column _COLUMN[i] of eight.
_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)


def check(settings: Mapping[str, Any], path: object) -> None:
    """Raise `CheckpointError` for unsupported settings."""
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise CheckpointError(f"{path}: AWQ with {bits} bits is not supported; supported is 4")
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise CheckpointError(
            f"{path}: AWQ in the {version} layout is not supported; supported is gemm"
        )


def read(
    get: Callable[[str], np.ndarray], has: Callable[[str], bool], module: str, settings: Any
) -> Weight:
    """Read a module's weight. `get` reads a tensor of the checkpoint by name."""
    codes = np.ascontiguousarray(_columns(get(f"{module}.qweight")).T)
    scales = get(f"{module}.scales")
    zeros = _columns(get(f"{module}.qzeros")).astype(np.int32)
    check_parts(module, codes, scales, zeros)
    num_inputs = codes.shape[1]
    if num_inputs % scales.shape[0]:
        raise CheckpointError(f"the {num_inputs} inputs of {module!r} have {len(scales)} groups")
    groups = np.arange(num_inputs) // (num_inputs // scales.shape[0])
    return grouped_weight(codes, scales, zeros, groups, 4, module)


def _columns(words: np.ndarray) -> np.ndarray:
    """Unpack int32 `[rows, n]` to uint8 `[rows, 8 * n]`, columns in order."""
    stored = unpack(words, 4, 1).reshape(words.shape[0], -1, 8)
    order = [_COLUMN.index(column) for column in range(8)]
    return stored[..., order].reshape(len(words), -1)
