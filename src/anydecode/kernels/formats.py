"""Weight formats: sizes, dequantisation and quantisation, vectorised in numpy.

The byte layouts are those of GGUF: a row consists of blocks, each with its codes and scales. The
arithmetic follows the order of operations of the `gguf` package, so that float32 results are
bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight

#: Format -> (values per block, bytes per block).
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}

#: The values of the codes of IQ4_NL and IQ4_XS, and those of MXFP4 times two.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(bfloat16),
}

#: Formats that `quantize` writes.
QUANTIZABLE = ("Q8_0", "Q4_0", "Q4_1")

# Rows are converted in groups of about this many values, to limit the size of temporaries.
GROUP_VALUES = 1 << 21


def is_packed(format: str) -> bool:
    """Whether a format stores blocks of codes rather than plain numbers."""
    return format not in DTYPES


def row_bytes(format: str, in_features: int) -> int:
    """Bytes of one row of `in_features` values.

    Raises:
        ValueError: The row does not divide into blocks of the format.
    """
    values, size = BLOCKS[format]
    if in_features % values:
        raise ValueError(f"a row of {in_features} values does not divide into {format} blocks")
    return in_features // values * size


def check_weight(weight: Weight) -> None:
    """Check the dtype and shape of a weight's data, which the kernels read as raw memory.

    Raises:
        CheckpointError: They are not those of the weight's format and size.
    """
    packed = is_packed(weight.format)
    values, size = BLOCKS[weight.format]
    columns = weight.in_features // values * size if packed else weight.in_features
    dtype = np.dtype(np.uint8) if packed else DTYPES[weight.format]
    data = weight.data
    is_valid = data.dtype == dtype and data.shape == (weight.out_features, columns)
    if not is_valid or weight.in_features % values or not data.size:
        raise CheckpointError(
            f"{weight.name or 'a weight'} holds {data.dtype} of shape {data.shape}, not a"
            f" {weight.format} matrix of {weight.out_features} by {weight.in_features}"
        )


def plain_weight(matrix: np.ndarray, name: str = "") -> Weight:
    """A `Weight` over a float matrix `[out_features, in_features]`, without a copy.

    Raises:
        ValueError: The array is no matrix in float32, float16 or bfloat16.
    """
    format = next((f for f, dtype in DTYPES.items() if dtype == matrix.dtype), None)
    if format is None or matrix.ndim != 2:
        raise ValueError(f"no weight format for {matrix.dtype} of shape {matrix.shape}")
    return Weight(format, matrix.shape[0], matrix.shape[1], matrix, name)


def dequantize(weight: Weight) -> np.ndarray:
    """The matrix as float32 `[out_features, in_features]`."""
    return _to_float(weight.format, weight.data, weight.in_features)


def dequantize_rows(weight: Weight, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Some rows as float32 `[len(rows), in_features]`; no other row is converted."""
    return _to_float(weight.format, weight.data[np.asarray(rows, np.int64)], weight.in_features)


def quantize(matrix: np.ndarray, format: str, name: str = "") -> Weight:
    """Quantise a float matrix by rounding to nearest, as GGUF's reference does.

    Args:
        matrix: `[out_features, in_features]`.
        format: "Q8_0", "Q4_0" or "Q4_1".
        name: Name of the weight.

    Returns:
        The weight; in bfloat16 where `in_features` is not a multiple of 32.

    Raises:
        ValueError: The format is another one.
    """
    if format not in QUANTIZABLE:
        raise ValueError(f"cannot quantise to {format}; allowed are {', '.join(QUANTIZABLE)}")
    rows, columns = matrix.shape
    values, size = BLOCKS[format]
    if columns % values:
        return Weight("BF16", rows, columns, matrix.astype(DTYPES["BF16"]), name)
    data = np.empty((rows, columns // values * size), np.uint8)
    step = max(1, GROUP_VALUES // columns)
    for start in range(0, rows, step):
        group = matrix[start : start + step].astype(np.float32, copy=False).reshape(-1, values)
        with np.errstate(all="ignore"):  # infinities and NaN pass through
            data[start : start + step] = _QUANTIZERS[format](group).reshape(-1, data.shape[1])
    return Weight(format, rows, columns, data, name)


def _to_float(format: str, data: np.ndarray, in_features: int) -> np.ndarray:
    if not is_packed(format):
        return data.astype(np.float32, copy=False)
    rows, (_, size) = data.shape[0], BLOCKS[format]
    out = np.empty((rows, in_features), np.float32)
    step = max(1, GROUP_VALUES // max(1, in_features))
    for start in range(0, rows, step):
        blocks = data[start : start + step].reshape(-1, size)
        with np.errstate(all="ignore"):  # infinities and NaN pass through
            out[start : start + step] = _DEQUANTIZERS[format](blocks).reshape(-1, in_features)
    return out


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block, as float32 `[blocks, 1]`."""
    stored = np.ascontiguousarray(blocks[:, start : start + 2])
    return stored.view(np.float16).astype(np.float32)


def _flat(codes: np.ndarray) -> np.ndarray:
    """All axes but the first as one."""
    return codes.reshape(len(codes), -1)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Bytes `[..., width]` as codes `[..., 2, width]`: the low nibbles, then the high ones."""
    return np.stack((codes & 15, codes >> 4), axis=-2)


def _bits(codes: np.ndarray, width: int) -> np.ndarray:
    """Bytes `[..., n]` as fields of `width` bits `[..., 8 // width, n]`, lowest first."""
    mask = (1 << width) - 1
    return np.stack([(codes >> shift) & mask for shift in range(0, 8, width)], axis=-2)


def _signed(codes: np.ndarray) -> np.ndarray:
    """Bytes as signed numbers, float32."""
    return codes.view(np.int8).astype(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _signed(blocks[:, 2:])


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_flat(_nibbles(blocks[:, 2:])).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    codes = _flat(_nibbles(blocks[:, 4:])).astype(np.float32)
    return _half(blocks, 0) * codes + _half(blocks, 2)


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Five-bit codes: 4 bytes `high` with the top bit of each value, 16 bytes `low` of nibbles."""
    top = _flat(_bits(high, 1).swapaxes(-1, -2))
    return (_flat(_nibbles(low)) | (top << 4)).astype(np.float32)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + _half(blocks, 2)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets float32 `[blocks, 8, 1]` of Q4_K and Q5_K.

    Twelve bytes hold 8 six-bit scales and 8 six-bit minima: the first four of each in the low six
    bits of bytes 0-3 and 4-7; the last four in the nibbles of bytes 8-11, with their top two bits
    in the top of bytes 0-3 and 4-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 2) & 48)), 1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 2) & 48)), 1)
    scale = _half(blocks, 0) * scales.astype(np.float32)
    offset = _half(blocks, 2) * minima.astype(np.float32)
    return scale[..., None], offset[..., None]


def _low_codes(codes: np.ndarray) -> np.ndarray:
    """The nibbles of 128 bytes, `[blocks, 8, 32]`."""
    return _nibbles(codes.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    scale, offset = _k_scales(blocks)
    return scale * _low_codes(blocks[:, 16:]).astype(np.float32) - offset


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    scale, offset = _k_scales(blocks)
    codes = _low_codes(blocks[:, 48:]) | (_bits(blocks[:, 16:48], 1) << 4)
    return scale * codes.astype(np.float32) - offset


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _flat(_nibbles(blocks[:, :128].reshape(-1, 2, 64)))
    top = _flat(_bits(blocks[:, 128:192].reshape(-1, 2, 32), 2))
    codes = ((low | (top << 4)).astype(np.float32) - 32).reshape(-1, 16, 16)
    scale = _half(blocks, 208) * _signed(blocks[:, 192:208])
    return scale[..., None] * codes


def _two_bits(codes: np.ndarray) -> np.ndarray:
    """The two-bit fields of 64 bytes, `[blocks, 8, 32]`."""
    return _bits(codes.reshape(-1, 2, 32), 2).reshape(-1, 8, 32)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    scale = _half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    offset = _half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    codes = _two_bits(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    return scale[..., None] * codes - offset[..., None]


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    # Twelve bytes hold 16 six-bit scales: their low nibbles in bytes 0-7, the first eight in the
    # low halves; their upper two bits in bytes 8-11.
    low = _flat(_nibbles(blocks[:, 96:104]))
    scales = (low | (_flat(_bits(blocks[:, 104:108], 2)) << 4)).astype(np.float32) - 32
    codes = _two_bits(blocks[:, 32:96]) | (_bits(blocks[:, :32], 1) << 2)
    scale = _half(blocks, 108) * scales
    return scale[..., None] * (codes.reshape(-1, 16, 16).astype(np.float32) - 4)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _looked_up(IQ4_VALUES, _flat(_nibbles(blocks[:, 2:])))


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    # Six-bit scales: their low nibbles in bytes 4-7, their upper two bits in the 16 bits before.
    low = _nibbles(blocks[:, 4:8, None]).reshape(-1, 8)
    high = _bits(blocks[:, 2:4, None], 2).reshape(-1, 8)
    scale = _half(blocks, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32)
    return scale[..., None] * _looked_up(IQ4_VALUES, codes)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    # The scale is a power of two, stored as its biased exponent; the table's values are doubled.
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scale * _looked_up(MXFP4_VALUES, _flat(_nibbles(blocks[:, 1:])))


def _looked_up(values: tuple[int, ...], codes: np.ndarray) -> np.ndarray:
    return np.array(values, np.float32)[codes]


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _pack(codes: np.ndarray, *scales: np.ndarray) -> np.ndarray:
    """Blocks of float16 `scales` and then `codes` uint8."""
    heads = [scale.astype(np.float16).view(np.uint8) for scale in scales]
    return np.concatenate((*heads, codes), 1)


def _join_nibbles(codes: np.ndarray) -> np.ndarray:
    codes = codes.clip(0, 15).astype(np.uint8)
    return codes[:, :16] | (codes[:, 16:] << 4)


def _make_q8_0(values: np.ndarray) -> np.ndarray:
    scale = np.abs(values).max(1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(scale)
    # Halves are rounded away from zero, as in the reference; np.rint rounds them to even.
    magnitude = np.abs(scaled)
    rounded = np.floor(magnitude)
    rounded = rounded + np.floor(2 * (magnitude - rounded))
    return _pack((rounded * np.sign(scaled)).astype(np.int8).view(np.uint8), scale)


def _make_q4_0(values: np.ndarray) -> np.ndarray:
    extreme = np.take_along_axis(values, np.abs(values).argmax(1)[:, None], 1)
    scale = extreme / np.float32(-8)
    codes = np.trunc(values * _inverse(scale) + np.float32(8.5))
    return _pack(_join_nibbles(codes), scale)


def _make_q4_1(values: np.ndarray) -> np.ndarray:
    low = values.min(1, keepdims=True)
    scale = (values.max(1, keepdims=True) - low) / np.float32(15)
    codes = np.trunc((values - low) * _inverse(scale) + np.float32(0.5))
    return _pack(_join_nibbles(codes), scale, low)


_Blockwise = Callable[[np.ndarray], np.ndarray]

_DEQUANTIZERS: dict[str, _Blockwise] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}

_QUANTIZERS: dict[str, _Blockwise] = {
    "Q8_0": _make_q8_0,
    "Q4_0": _make_q4_0,
    "Q4_1": _make_q4_1,
}
