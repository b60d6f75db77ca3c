"""Weights of the tests of torch backends, from and to tensors."""

from __future__ import annotations

import torch

from anydecode.kernels import formats
from anydecode.kernels.interface import Weight
from anydecode.kernels.torch_arrays import as_numpy, as_tensor


def plain_weight(matrix: torch.Tensor, name: str = "") -> Weight:
    """`formats.plain_weight` of a tensor."""
    return formats.plain_weight(as_numpy(matrix), name)


def quantize(matrix: torch.Tensor, format: str, name: str = "") -> Weight:
    """`formats.quantize` of a tensor."""
    return formats.quantize(as_numpy(matrix), format, name)


def dequantize(weight: Weight) -> torch.Tensor:
    """`formats.dequantize` as a tensor."""
    return as_tensor(formats.dequantize(weight))
