"""Reads GPTQ weights: codes packed along the inputs, zero points along the outputs (Frantar et al.,
2022, arXiv:2210.17323, in the layout of AutoGPTQ and GPTQModel)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight
from anydecode.models.loading.groups import check_parts, grouped_weight, unpack

#: The tensor that only packed modules have.
MARKER = "qweight"
#: The tensors of one packed module, except its bias.
PARTS = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)
_VERSIONS = ("gptq", "gptq_v2")


def check(settings: Mapping[str, Any], path: object) -> None:
    """Raise `CheckpointError` for unsupported settings."""
    bits, version = settings.get("bits"), settings.get("checkpoint_format") or "gptq"
    if not isinstance(bits, int) or bits not in BITS:
        raise CheckpointError(
            f"{path}: GPTQ with {bits} bits is not supported; supported are 2, 3, 4 and 8"
        )
    if version not in _VERSIONS or settings.get("is_marlin_format"):
        version = "marlin" if settings.get("is_marlin_format") else version
        raise CheckpointError(
            f"{path}: GPTQ with checkpoint_format {version!r} is not supported; supported are"
            f" {' and '.join(_VERSIONS)}, which no kernel has rearranged"
        )


def read(
    get: Callable[[str], np.ndarray], has: Callable[[str], bool], module: str, settings: Any
) -> Weight:
    """Read a module's weight. `get` reads a tensor of the checkpoint by name."""
    packed, scales = get(f"{module}.qzeros"), get(f"{module}.scales")
    bits = _bits(packed, scales, module)
    codes = np.ascontiguousarray(unpack(get(f"{module}.qweight"), bits, 0).T)
    zeros = unpack(packed, bits, 1).astype(np.int32)
    if settings.get("checkpoint_format") != "gptq_v2":
        # Version 1 of the format stores each zero point minus 1. With 8 bits, 0 is stored as 255.
        zeros = (zeros + 1) & ((1 << bits) - 1) if bits == 8 else zeros + 1
    check_parts(module, codes, scales, zeros)
    num_inputs = codes.shape[1]
    if has(f"{module}.g_idx"):
        groups = get(f"{module}.g_idx").astype(np.int64)
    else:
        groups = np.arange(num_inputs) // -(-num_inputs // scales.shape[0])
    if groups.shape != (num_inputs,) or groups.min() < 0 or groups.max() >= len(scales):
        raise CheckpointError(
            f"the quantised parts of {module!r} do not fit together: its g_idx is not a group, of"
            f" {len(scales)}, for each of {num_inputs} inputs"
        )
    return grouped_weight(codes, scales, zeros, groups, bits, module)


def _bits(zeros: np.ndarray, scales: np.ndarray, module: str) -> int:
    """The bits per code of a module, which may differ from those in the settings (GPTQModel's
    `dynamic`, AutoRound's `extra_config`): those of the zero points of its outputs."""
    is_matrix = zeros.ndim == scales.ndim == 2 and scales.shape[1] > 0
    bits = 32 * zeros.shape[1] / scales.shape[1] if is_matrix else 0
    if bits not in BITS:
        raise CheckpointError(
            f"the quantised parts of {module!r} do not fit together: {scales.shape} scales and"
            f" {zeros.shape} words of zero points; allowed are 2, 3, 4 or 8 bits per zero point"
        )
    return int(bits)
