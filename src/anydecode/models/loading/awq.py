"""Reads AWQ weights (Lin et al., 2023, arXiv:2306.00978), in the layouts of AutoAWQ.

- gemm: codes and zero points are packed along the outputs, in the interleaved order of its kernel.
- gemv: both are packed along the inputs and groups, in order; the groups of an output are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight
from anydecode.models.limits import integer
from anydecode.models.loading.groups import check_parts, grouped_weight, unpack

MARKER = "qweight"
PARTS = ("qweight", "qzeros", "scales")

#: Field i of a 32-bit word holds column _COLUMN[i] of eight.
_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)
_BITS = 4
_VERSIONS = ("gemm", "gemv")


def check(settings: Mapping[str, Any], path: object) -> None:
    """Raise `CheckpointError` for unsupported settings."""
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != _BITS:
        raise CheckpointError(f"{path}: AWQ with {bits} bits is not supported; supported is 4")
    version = _version(settings)
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path}: AWQ in the {version} layout is not supported; supported are"
            f" {' and '.join(_VERSIONS)}"
        )
    if version == "gemv":
        integer("group_size", _group(settings))


def read(
    get: Callable[[str], np.ndarray], has: Callable[[str], bool], module: str, settings: Any
) -> Weight:
    """Read a module's weight. `get` reads a tensor of the checkpoint by name."""
    words, packed, scales = (get(f"{module}.{part}") for part in PARTS)
    if _version(settings) == "gemv":
        codes = unpack(words, _BITS, 1)
        count = -(-codes.shape[1] // _group(settings))
        zeros = unpack(packed, _BITS, 1)[:, :count].astype(np.int32).T
        scales = scales[..., :count].T
    else:
        codes = np.ascontiguousarray(_columns(words).T)
        zeros = _columns(packed).astype(np.int32)
    check_parts(module, codes, scales, zeros)
    num_inputs = codes.shape[1]
    if num_inputs % scales.shape[0]:
        raise CheckpointError(f"the {num_inputs} inputs of {module!r} have {len(scales)} groups")
    groups = np.arange(num_inputs) // (num_inputs // scales.shape[0])
    return grouped_weight(codes, scales, zeros, groups, _BITS, module)


def _version(settings: Mapping[str, Any]) -> str:
    return str(settings.get("version") or _VERSIONS[0]).lower()


def _group(settings: Mapping[str, Any]) -> Any:
    return settings.get("group_size", settings.get("q_group_size"))


def _columns(words: np.ndarray) -> np.ndarray:
    """Unpack int32 `[rows, n]` to uint8 `[rows, 8 * n]`, columns in order."""
    stored = unpack(words, _BITS, 1).reshape(words.shape[0], -1, 8)
    order = [_COLUMN.index(column) for column in range(8)]
    return stored[..., order].reshape(len(words), -1)
