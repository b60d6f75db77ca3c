"""Reads NVFP4 weights: 4-bit numbers, a scale in E4M3 for every 16 of them, and one float32 factor.

ModelOpt stores `weight` (two numbers per byte), `weight_scale` and the factor `weight_scale_2`;
compressed-tensors stores `weight_packed`, `weight_scale` and the divisor `weight_global_scale`. The
scales of activations are not used: products round activations to int8.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import BLOCKS, halves_paired
from anydecode.kernels.interface import Weight

_GROUP = 16  # numbers per scale
_E4M3_NAN = 127


def read(
    get: Callable[[str], np.ndarray], module: str, codes: str, factor: str, is_divisor: bool = False
) -> Weight:
    """Read a module's weight.

    Args:
        get: Reads a tensor of the checkpoint by name.
        module: The name of the module.
        codes: The tensor of the numbers.
        factor: The tensor of the factor.
        is_divisor: Whether weights are divided by the factor.
    """
    number = _number(get, f"{module}.{factor}")
    packed, scales = get(f"{module}.{codes}"), get(f"{module}.weight_scale")
    return _weight(module, packed, scales, 1 / number if is_divisor else number)


def _number(get: Callable[[str], np.ndarray], name: str) -> float:
    tensor = get(name)
    number = float(tensor.reshape(-1)[0]) if tensor.size == 1 else 0.0
    if tensor.dtype != np.float32 or not 0 < number < np.inf:
        raise CheckpointError(
            f"{name!r} is {tensor.dtype} of shape {tensor.shape}, not one positive float32"
        )
    return number


def _weight(module: str, codes: np.ndarray, scales: np.ndarray, scale: float) -> Weight:
    """A weight in GGUF's blocks of 64 numbers.

    Args:
        module: The name of the module.
        codes: uint8 `[out, in / 2]`; the first of two numbers is in the low half of a byte.
        scales: float8_e4m3fn `[out, in / 16]`.
        scale: The factor of all.
    """
    values, size = BLOCKS["NVFP4"]
    is_valid = codes.ndim == 2 and codes.dtype == np.uint8 and scales.dtype.name == "float8_e4m3fn"
    if not is_valid or scales.shape != (len(codes), codes.shape[1] * 2 // _GROUP):
        raise CheckpointError(
            f"the quantised parts of {module!r} do not fit together: {codes.dtype} codes of shape"
            f" {codes.shape} and {scales.dtype} scales of shape {scales.shape}"
        )
    rows, num_inputs = codes.shape[0], codes.shape[1] * 2
    if not codes.size or num_inputs % values:
        raise CheckpointError(
            f"{module!r} has {num_inputs} inputs; NVFP4 needs a multiple of {values}"
        )
    stored = scales.view(np.uint8)
    if (stored >= _E4M3_NAN).any():
        raise CheckpointError(f"a scale of {module!r} is negative or no number")
    blocks = np.empty((rows, num_inputs // values, size), np.uint8)
    blocks[..., :4] = stored.reshape(rows, -1, 4)
    packed = halves_paired(codes.reshape(rows, -1, 4, 8))
    blocks[..., 4:] = packed.reshape(rows, -1, values // 2)
    return Weight("NVFP4", rows, num_inputs, blocks.reshape(rows, -1), module, scale)
