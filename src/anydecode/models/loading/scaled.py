"""Converts quantised numbers with a scale per tensor, output, group of inputs or block to the
engine's weight formats, without loss.

weight[o, i] = number[o, i] * scale[o, g], where g is the group of input i. Integers whose groups
have a multiple of 32 inputs, with scales that float16 holds, get the smallest block format that
holds them: Q4_0 (-8 to 7), Q5_0 (-16 to 15) or Q8_0 (-128 to 127). The inputs of a group need not
be neighbours, see `groups.py`. With one scale for the whole matrix, that scale is the factor of
Q8_0 or bfloat16 numbers. Everything else becomes plain numbers in the type of the scales, which is
what the tools that write these files dequantise to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import BLOCKS, DTYPES, GROUP_VALUES, halves_paired, plain_weight
from anydecode.kernels.interface import Weight
from anydecode.models.loading.groups import BLOCK, block_groups, block_weight

#: Block format -> the largest number below zero.
_LOWEST = {"Q4_0": -8, "Q5_0": -16, "Q8_0": -128}


def scaled_weight(
    numbers: np.ndarray,
    scales: np.ndarray,
    groups: np.ndarray,
    module: str,
    dtype: np.dtype[Any] | None = None,
) -> Weight:
    """Build a `Weight` from numbers and their scales.

    Args:
        numbers: Integers (zero points subtracted) or 8-bit floats, `[out, in]`.
        scales: In float32, float16 or bfloat16, `[out, groups]`, or one number.
        groups: The group of each input, int64 `[in]`.
        module: The name of the result, also for errors.
        dtype: The type of plain numbers; None: that of the scales.

    Raises:
        CheckpointError: The parts do not fit together, or a scale is no finite number.
    """
    check_scales(numbers, scales, module)
    if scales.size == 1:
        return _with_factor(numbers, float(scales.reshape(-1)[0]), module)
    is_consistent = scales.ndim == 2 and len(scales) == len(numbers) and groups.min() >= 0
    if not is_consistent or groups.shape != numbers.shape[1:] or groups.max() >= scales.shape[1]:
        raise misfit(module, numbers, scales)
    blocks, order = block_groups(groups) if numbers.dtype.kind == "i" else (None, None)
    if blocks is not None and (scales == scales.astype(np.float16)).all():
        format = _smallest(numbers)
        if format is not None:
            numbers = numbers if order is None else numbers[:, order]
            return _pack(format, numbers, scales.astype(np.float16)[:, blocks], module, order)
    values = np.empty(numbers.shape, dtype or scales.dtype)
    step = max(1, GROUP_VALUES // numbers.shape[1])
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        factors = scales[part].astype(np.float32)[:, groups]
        values[part] = numbers[part].astype(np.float32) * factors
    return plain_weight(values, module)


def check_scales(numbers: np.ndarray, scales: np.ndarray, module: str) -> None:
    """Check that there are numbers and scales, in valid types.

    Raises:
        CheckpointError: There are none, or a scale is no finite float.
    """
    if numbers.ndim != 2 or not numbers.size or not scales.size:
        raise misfit(module, numbers, scales)
    if scales.dtype not in DTYPES.values():
        raise CheckpointError(f"the scales of {module!r} are {scales.dtype}, no float")
    if not np.isfinite(scales.astype(np.float32)).all():
        raise CheckpointError(f"a scale of {module!r} is not finite")


def misfit(module: str, *parts: np.ndarray) -> CheckpointError:
    """The error for parts of a module that do not fit together."""
    listed = ", ".join(f"{part.dtype} of shape {part.shape}" for part in parts)
    return CheckpointError(f"the quantised parts of {module!r} do not fit together: {listed}")


def runs(num_inputs: int, num_groups: int, module: str) -> np.ndarray:
    """The group of each input where groups are runs of equal length, int64 `[num_inputs]`.

    Raises:
        CheckpointError: The inputs do not divide into the groups.
    """
    if num_groups < 1 or num_inputs % num_groups:
        raise CheckpointError(f"the {num_inputs} inputs of {module!r} have {num_groups} groups")
    return np.arange(num_inputs) // (num_inputs // num_groups)


def _with_factor(numbers: np.ndarray, factor: float, module: str) -> Weight:
    """A weight whose only scale is `Weight.scale`."""
    is_byte = numbers.dtype.kind == "i" and _smallest(numbers) is not None
    if is_byte and numbers.shape[1] % BLOCK == 0:
        ones = np.ones((len(numbers), numbers.shape[1] // BLOCK), np.float16)
        weight = _pack("Q8_0", numbers, ones, module)
    else:
        weight = plain_weight(numbers.astype(DTYPES["BF16"]), module)
    weight.scale = factor
    return weight


def _smallest(numbers: np.ndarray) -> str | None:
    """The smallest block format that holds all integers; None if there is none."""
    low, high = int(numbers.min()), int(numbers.max())
    fitting = (name for name, lowest in _LOWEST.items() if lowest <= low and high < -lowest)
    return next(fitting, None)


def _pack(
    format: str,
    numbers: np.ndarray,
    scales: np.ndarray,
    module: str,
    order: np.ndarray | None = None,
) -> Weight:
    """Integers as blocks of 32 of a format, with scales float16 `[out, blocks]`. `order` is the
    order of the inputs, see `Weight`."""
    blocks = numbers.reshape(len(numbers), -1, BLOCK)
    scale = np.ascontiguousarray(scales)[..., None]
    if format == "Q8_0":
        codes = blocks.astype(np.int8).view(np.uint8)
        return block_weight("Q8_0", module, codes, scale, order=order)
    codes = (blocks - _LOWEST[format]).astype(np.uint8)
    low = codes[..., :16] & 15 | codes[..., 16:] << 4
    if format == "Q4_0":
        return block_weight("Q4_0", module, low, scale, order=order)
    high = np.packbits(codes >> 4, axis=-1, bitorder="little")
    return block_weight("Q5_0", module, low, scale, high, order=order)


def mxfp4_weight(module: str, codes: np.ndarray, scales: np.ndarray) -> Weight:
    """4-bit floats with an exponent for every 32 of them.

    Args:
        module: The name of the module.
        codes: uint8 `[out, in / 2]`; the first of two numbers is in the low half of a byte.
        scales: uint8 `[out, in / 32]`, the exponents plus 127.
    """
    values, _ = BLOCKS["MXFP4"]
    is_valid = codes.ndim == 2 and codes.dtype == scales.dtype == np.uint8 and codes.size
    if not is_valid or scales.shape != (len(codes), codes.shape[1] * 2 // values):
        raise misfit(module, codes, scales)
    if codes.shape[1] * 2 % values or (scales == 255).any():
        raise CheckpointError(
            f"{module!r} has {codes.shape[1] * 2} inputs and exponents up to {scales.max()}; MXFP4"
            f" needs a multiple of {values} inputs, and exponents below 255"
        )
    blocks = halves_paired(codes.reshape(len(codes), -1, values // 2))
    return block_weight("MXFP4", module, blocks, scales[..., None])
