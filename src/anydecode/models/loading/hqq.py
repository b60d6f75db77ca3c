"""Reads HQQ weights: codes of 8, 4, 3, 2 or 1 bits with a scale and a zero point, which is no
integer, per group (Badri and Shaji, 2023, "Half-Quadratic Quantization of Large Machine Learning
Models"), in the layout of hqq and transformers.

weight = (code - zero) * scale. Groups of a multiple of 32 inputs with at most 4 bits become Q4_1,
whose offset -scale * zero is rounded to float16, by less than 0.8% of a step. Everything else
becomes plain numbers in the type in which hqq computes: the same bits to which it dequantises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES, plain_weight
from anydecode.kernels.interface import Weight
from anydecode.models.loading.groups import BLOCK, block_weight
from anydecode.models.loading.layout import Layout
from anydecode.models.loading.scaled import check_scales, misfit

#: The tensor that only packed modules have.
MARKER = "W_q"
_PARTS = (
    "W_q", "axis", "channel_wise", "compute_dtype", "encoded_state_dict", "group_size", "nbits",
    "offload_meta", "optimize", "packing", "quant_scale", "quant_zero", "round_zero", "scale",
    "shape", "stores_quant_config", "unpack_view_dtype", "view_as_float", "zero",
)  # fmt: skip
#: Packing -> (bits per word, fields per word). The first field is the highest.
_PACKINGS = {
    "8bit_u8": (8, 1),
    "4bit_u8": (8, 2),
    "3bit_32": (32, 10),
    "2bit_u8": (8, 4),
    "1bit_u8": (8, 8),
}
_TYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
_MAX_ZERO = 16  # beyond which the rounding of an offset of Q4_1 would be larger

Get = Callable[[str], np.ndarray]


def layouts(settings: Any, path: object) -> list[Layout]:
    """The only layout: everything about a module is stored with it."""
    return [Layout(MARKER, _PARTS, _read)]


def _read(get: Get, has: Callable[[str], bool], module: str, settings: Any) -> Weight:
    def number(name: str, default: int) -> int:
        return int(get(f"{module}.{name}").item()) if has(f"{module}.{name}") else default

    if number("quant_scale", 0) or number("quant_zero", 0):
        raise CheckpointError(f"the scales or zero points of {module!r} are quantised themselves")
    shape, axis = [int(size) for size in get(f"{module}.shape")], number("axis", 1)
    if len(shape) != 2 or min(shape) < 1 or axis not in (0, 1):
        raise CheckpointError(f"{module!r} has the shape {shape} and the axis {axis}")
    dtype = np.dtype(DTYPES[_TYPES[_text(get, module, "compute_dtype", _TYPES)]])
    scales, zeros = get(f"{module}.scale"), get(f"{module}.zero")
    codes = _codes(get, module, shape, axis, scales)
    is_consistent = scales.shape == zeros.shape and scales.dtype == zeros.dtype
    if not is_consistent or (scales.size > 1 and scales.shape[axis] != 1):
        raise misfit(module, codes, scales, zeros)
    check_scales(codes, scales, module)
    if scales.size > 1 and scales.shape[1 - axis] != codes.shape[1 - axis]:
        raise misfit(module, codes, scales, zeros)
    if axis == 1 and codes.max() < 16 and scales.size > 1 and shape[1] % codes.shape[1] == 0:
        packed = _packed(codes, scales, zeros, shape, module)
        if packed is not None:
            return packed
    # The order and the roundings of hqq.
    values = (codes.astype(dtype) - zeros.astype(dtype)) * scales.astype(dtype)
    return plain_weight(values.reshape(shape), module)


def _codes(get: Get, module: str, shape: list[int], axis: int, scales: np.ndarray) -> np.ndarray:
    """The codes uint8, `[groups, group]` along axis 1 and `[group, groups]` along axis 0."""
    width, fields = _PACKINGS[_text(get, module, "packing", _PACKINGS)]
    bits = width // fields
    stored = np.ascontiguousarray(get(f"{module}.W_q"))
    if stored.ndim != 2 or not stored.size or (fields != 1 and stored.dtype.kind not in "iufV"):
        raise misfit(module, stored)
    words = stored.view(np.uint32 if width == 32 else np.uint8)
    shifts = range(bits * (fields - 1), -1, -bits)
    codes = np.concatenate(
        [(words >> shift & ((1 << bits) - 1)).astype(np.uint8) for shift in shifts]
    )
    count, groups = shape[0] * shape[1], scales.shape[1 - axis] if scales.ndim == 2 else 1
    if count % groups or (codes.shape[1] if axis == 1 else groups) < 1:
        raise misfit(module, stored, scales)
    codes = codes[: groups if axis == 1 else count // groups]  # fields of 3 bits are padded
    if codes.size != count:
        raise misfit(module, stored, scales)
    return codes


def _packed(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, shape: list[int], module: str
) -> Weight | None:
    """A weight in Q4_1; None if groups, scales or zero points do not fit."""
    scale, zero = (part.astype(np.float32) for part in (scales, zeros))
    is_exact = (scale == scale.astype(np.float16)).all() and (np.abs(zero) <= _MAX_ZERO).all()
    if codes.shape[1] % BLOCK or not is_exact:
        return None
    per_group = codes.shape[1] // BLOCK
    parts = (scale.astype(np.float16), (-scale * zero).astype(np.float16))
    heads = [np.repeat(part, per_group, 0).reshape(shape[0], -1, 1) for part in parts]
    blocks = codes.reshape(shape[0], -1, BLOCK)
    return block_weight("Q4_1", module, blocks[..., :16] | blocks[..., 16:] << 4, *heads)


def _text(get: Get, module: str, name: str, allowed: dict[str, Any]) -> str:
    """A text that is stored as a tensor of bytes."""
    stored = get(f"{module}.{name}").astype(np.uint8).tobytes().decode("ascii", "replace")
    if stored not in allowed:
        raise CheckpointError(
            f"the {name} of {module!r} is {stored!r}; supported are {', '.join(allowed)}"
        )
    return stored
