"""AWQ: codes and zero points packed along the outputs, in the interleaved order of its GEMM kernel
(Lin et al., 2023, arXiv:2306.00978, in the layout of AutoAWQ)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight
from anydecode.models.loading.groups import grouped_weight, unpack

PARTS = ("qweight", "qzeros", "scales")

#: Field i of a word holds column _COLUMN[i] of the eight.
_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)


def check(settings: Mapping[str, Any], path: object) -> None:
    """Raise `CheckpointError` for settings this file does not read."""
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise CheckpointError(f"{path}: AWQ with {bits} bits is not supported; 4 is")
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise CheckpointError(f"{path}: AWQ in the {version} layout is not supported; gemm is")


def read(
    get: Callable[[str], torch.Tensor], has: Callable[[str], bool], module: str, settings: Any
) -> Weight:
    """The module's weight. `get` reads a tensor of the checkpoint by name."""
    codes = _columns(get(f"{module}.qweight")).T.contiguous()
    scales = get(f"{module}.scales")
    zeros = _columns(get(f"{module}.qzeros")).to(torch.int32)
    num_inputs = codes.shape[1]
    fits = scales.shape == zeros.shape and scales.shape[1] == codes.shape[0]
    if not fits or num_inputs % scales.shape[0]:
        raise CheckpointError(f"the quantised parts of {module!r} do not fit together")
    groups = torch.arange(num_inputs) // (num_inputs // scales.shape[0])
    return grouped_weight(codes, scales, zeros, groups, 4, module)


def _columns(words: torch.Tensor) -> torch.Tensor:
    """int32 `[rows, n]` to uint8 `[rows, 8 * n]` in the true order of columns."""
    stored = unpack(words, 4, 1).view(words.shape[0], -1, 8)
    position = [_COLUMN.index(column) for column in range(8)]
    return stored[..., position].flatten(1)
