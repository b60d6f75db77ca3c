"""Weight formats: sizes, dequantisation and quantisation, vectorised in numpy.

The byte layouts are those of GGUF: a row consists of blocks, each with its codes and scales. The
arithmetic follows the order of operations of the `gguf` package, so that float32 results are
bit-equal. A block of NF4 or FP4 is a scale in float32 and two times 32 codes in the order of GGUF's
Q4_0; the arithmetic is that of bitsandbytes in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from anydecode.errors import CheckpointError
from anydecode.kernels import ptq161
from anydecode.kernels.bit_fields import bits, flat, half, nibbles, signed
from anydecode.kernels.grids import GRID_FORMATS, grid_codes
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
    "NVFP4": (64, 36),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "NF4": (64, 36),
    "FP4": (64, 36),
}

#: The values of the codes of IQ4_NL and IQ4_XS, and those of MXFP4 and NVFP4 times two.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

#: The numbers of the codes of NF4 and FP4, float32: those of bitsandbytes (Dettmers et al., 2023,
#: arXiv:2305.14314).
BITSANDBYTES_VALUES = {
    "NF4": np.array(
        [
            -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
            0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
        ],
        np.float32,
    ),
    "FP4": np.array(
        [0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48], np.float32
    )
    / np.float32(192),
}  # fmt: skip

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
    if format == ptq161.FORMAT:
        return ptq161.row_bytes(in_features)
    values, size = BLOCKS[format]
    if in_features % values:
        raise ValueError(f"a row of {in_features} values does not divide into {format} blocks")
    return in_features // values * size


def check_weight(weight: Weight) -> None:
    """Check the dtype and shape of a weight's data, which the kernels read as raw memory.

    Raises:
        CheckpointError: They are not those of the weight's format and size.
    """
    if weight.format == ptq161.FORMAT:
        ptq161.check(weight)
        return
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
    order = weight.order
    if order is not None and not (
        packed
        and order.dtype == np.int32
        and np.array_equal(np.sort(order), np.arange(weight.in_features))
    ):
        raise CheckpointError(
            f"the order of the inputs of {weight.name or 'a weight'} is not each of the"
            f" {weight.in_features} inputs of a packed matrix once"
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
    return _to_float(weight, weight.data)


def dequantize_rows(weight: Weight, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Some rows as float32 `[len(rows), in_features]`; no other row is converted."""
    return _to_float(weight, weight.data[np.asarray(rows, np.int64)])


def in_order(weight: Weight) -> Weight:
    """The weight itself, or in float16 where its inputs are stored in another order."""
    if weight.order is None:
        return weight
    return plain_weight(dequantize(weight).astype(np.float16), weight.name)


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


def _to_float(weight: Weight, data: np.ndarray) -> np.ndarray:
    """Some rows of a weight in float32."""
    format, in_features = weight.format, weight.in_features
    if not is_packed(format):
        values = data.astype(np.float32, copy=False)
        return values if weight.scale == 1 else values * np.float32(weight.scale)
    if format == ptq161.FORMAT:
        return ptq161.dequantize(weight, data)
    rows, (_, size) = data.shape[0], BLOCKS[format]
    out = np.empty((rows, in_features), np.float32)
    step = max(1, GROUP_VALUES // max(1, in_features))
    for start in range(0, rows, step):
        blocks = data[start : start + step].reshape(-1, size)
        with np.errstate(all="ignore"):  # infinities and NaN pass through
            out[start : start + step] = _DEQUANTIZERS[format](blocks).reshape(-1, in_features)
    if weight.scale != 1:
        out *= np.float32(weight.scale)
    if weight.order is not None:
        out[:, weight.order] = out.copy()
    return out


def halves_paired(codes: np.ndarray) -> np.ndarray:
    """Bytes `[..., n / 2]` of codes in GGUF's order: byte i holds the codes i and i + n / 2.

    Args:
        codes: uint8 `[..., n / 2]`. Byte i holds the code 2i in its low half and 2i + 1 in its high
            half.
    """
    result = np.empty(codes.shape, np.uint8)
    middle = codes.shape[-1] // 2
    first, second = codes[..., :middle], codes[..., middle:]
    result[..., 0::2] = first & 15 | second << 4
    result[..., 1::2] = first >> 4 | second & 240
    return result


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 0) * signed(blocks[:, 2:])


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 0) * (flat(nibbles(blocks[:, 2:])).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    codes = flat(nibbles(blocks[:, 4:])).astype(np.float32)
    return half(blocks, 0) * codes + half(blocks, 2)


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Five-bit codes: 4 bytes `high` with the top bit of each value, 16 bytes `low` of nibbles."""
    top = flat(bits(high, 1).swapaxes(-1, -2))
    return (flat(nibbles(low)) | (top << 4)).astype(np.float32)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + half(blocks, 2)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets float32 `[blocks, 8, 1]` of Q4_K and Q5_K.

    Twelve bytes hold 8 six-bit scales and 8 six-bit minima: the first four of each in the low six
    bits of bytes 0-3 and 4-7; the last four in the nibbles of bytes 8-11, with their top two bits
    in the top of bytes 0-3 and 4-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 2) & 48)), 1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 2) & 48)), 1)
    scale = half(blocks, 0) * scales.astype(np.float32)
    offset = half(blocks, 2) * minima.astype(np.float32)
    return scale[..., None], offset[..., None]


def _low_codes(codes: np.ndarray) -> np.ndarray:
    """The nibbles of 128 bytes, `[blocks, 8, 32]`."""
    return nibbles(codes.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    scale, offset = _k_scales(blocks)
    return scale * _low_codes(blocks[:, 16:]).astype(np.float32) - offset


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    scale, offset = _k_scales(blocks)
    codes = _low_codes(blocks[:, 48:]) | (bits(blocks[:, 16:48], 1) << 4)
    return scale * codes.astype(np.float32) - offset


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = flat(nibbles(blocks[:, :128].reshape(-1, 2, 64)))
    top = flat(bits(blocks[:, 128:192].reshape(-1, 2, 32), 2))
    codes = ((low | (top << 4)).astype(np.float32) - 32).reshape(-1, 16, 16)
    scale = half(blocks, 208) * signed(blocks[:, 192:208])
    return scale[..., None] * codes


def _two_bits(codes: np.ndarray) -> np.ndarray:
    """The two-bit fields of 64 bytes, `[blocks, 8, 32]`."""
    return bits(codes.reshape(-1, 2, 32), 2).reshape(-1, 8, 32)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    scale = half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    offset = half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    codes = _two_bits(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    return scale[..., None] * codes - offset[..., None]


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    # Twelve bytes hold 16 six-bit scales: their low nibbles in bytes 0-7, the first eight in the
    # low halves; their upper two bits in bytes 8-11.
    low = flat(nibbles(blocks[:, 96:104]))
    scales = (low | (flat(bits(blocks[:, 104:108], 2)) << 4)).astype(np.float32) - 32
    codes = _two_bits(blocks[:, 32:96]) | (bits(blocks[:, :32], 1) << 2)
    scale = half(blocks, 108) * scales
    return scale[..., None] * (codes.reshape(-1, 16, 16).astype(np.float32) - 4)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 0) * _looked_up(IQ4_VALUES, flat(nibbles(blocks[:, 2:])))


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    # Six-bit scales: their low nibbles in bytes 4-7, their upper two bits in the 16 bits before.
    low = nibbles(blocks[:, 4:8, None]).reshape(-1, 8)
    high = bits(blocks[:, 2:4, None], 2).reshape(-1, 8)
    scale = half(blocks, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    codes = nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32)
    return scale[..., None] * _looked_up(IQ4_VALUES, codes)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    # The scale is a power of two, stored as its biased exponent; the table's values are doubled.
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scale * _looked_up(MXFP4_VALUES, flat(nibbles(blocks[:, 1:])))


def _nvfp4(blocks: np.ndarray) -> np.ndarray:
    codes = nibbles(blocks[:, 4:].reshape(-1, 4, 8)).reshape(-1, 4, 16)
    return e4m3(blocks[:, :4])[..., None] * _looked_up(MXFP4_VALUES, codes)


def _bitsandbytes(format: str, blocks: np.ndarray) -> np.ndarray:
    codes = nibbles(blocks[:, 4:].reshape(-1, 2, 16)).reshape(-1, 64)
    scale = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
    return scale * BITSANDBYTES_VALUES[format][codes]


def e4m3(stored: np.ndarray) -> np.ndarray:
    """Half the numbers of 4 exponent and 3 mantissa bits (E4M3, bias 7), without their signs.

    With its bits moved to those of a float16, a number is smaller by a power of two. 127 is no
    number and counts as 0.
    """
    halves = ((stored & 127).astype(np.uint16) << 7).view(np.float16)
    return np.where(stored == 127, np.float32(0), halves.astype(np.float32) * np.float32(128))


def ternary_codes(format: str, blocks: np.ndarray) -> np.ndarray:
    """The codes -1, 0 and 1 (and 2, in TQ2_0) of ternary blocks, int8 `[blocks, 256]`."""
    if format == "TQ2_0":
        return flat(_two_bits(blocks[:, :64])).astype(np.int8) - np.int8(1)
    # A byte is a fraction of 256: multiplied by 3, its whole part is the first digit in base 3.
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = (blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)
    rest = [flat(part[:, None] * powers[:count]) for part, count in parts]
    digits = (np.concatenate(rest, 1).astype(np.uint16) * 3) >> 8
    return digits.astype(np.int8) - np.int8(1)


def _tq1_0(blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 52) * ternary_codes("TQ1_0", blocks)


def _tq2_0(blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 64) * ternary_codes("TQ2_0", blocks)


def _gridded(format: str, blocks: np.ndarray) -> np.ndarray:
    codes, scale = grid_codes(format, blocks)
    return scale[..., None] * codes.reshape(*scale.shape, -1)


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
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    **{format: partial(_gridded, format) for format in GRID_FORMATS},
    **{format: partial(_bitsandbytes, format) for format in BITSANDBYTES_VALUES},
}

_QUANTIZERS: dict[str, _Blockwise] = {
    "Q8_0": _make_q8_0,
    "Q4_0": _make_q4_0,
    "Q4_1": _make_q4_1,
}
