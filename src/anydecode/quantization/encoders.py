"""Blocks of GGUF's formats from float32 values: rounding to nearest, with a search for the scales.

The search is that of llama.cpp's reference in outline: several scales are tried, and the one with
the smallest weighted squared error is kept. An importance matrix weighs these errors. The oldest
formats, Q4_0 to Q5_1, have a search only with an importance matrix, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from anydecode.kernels.formats import (
    BLOCKS,
    IQ4_VALUES,
    MXFP4_VALUES,
    QUANTIZABLE,
    e4m3,
    quantize,
)
from anydecode.quantization import grid_encoders

_TRIES = 20  # scales per block with a minimum
_SIGNED_TRIES = 6  # scales per block above and below that of the largest value


def encode(values: np.ndarray, format: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Encode rows of values.

    Args:
        values: float32 `[rows, columns]`; the columns divide into blocks of the format.
        format: One of `FORMATS`.
        importance: float32 `[columns]` or `[rows, columns]`, at least 0: the weights of squared
            errors, which all formats but `WEIGHED` do not read.

    Returns:
        uint8 `[rows, bytes]`.
    """
    if format in QUANTIZABLE and (importance is None or format not in WEIGHED):
        return quantize(values, format).data
    size = BLOCKS[format][0]
    blocks = values.reshape(-1, size)
    with np.errstate(all="ignore"):  # infinities and NaN pass through
        if format in SEARCHED and importance is None:
            return SEARCHED[format](blocks, None).reshape(len(values), -1)
        if importance is None or format not in WEIGHED:
            return _ENCODERS[format](blocks).reshape(len(values), -1)
        weights = np.broadcast_to(importance, values.shape).reshape(-1, size)
        return WEIGHED[format](blocks, weights).reshape(len(values), -1)


def _halves(*scales: np.ndarray) -> np.ndarray:
    """Float16 scales `[blocks, 1]` as bytes `[blocks, 2 * count]`."""
    return np.concatenate(scales, 1).astype(np.float16).view(np.uint8)


def _stored(scale: np.ndarray) -> np.ndarray:
    """A scale as it is read again."""
    return scale.astype(np.float16).astype(np.float32)


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def _paired(codes: np.ndarray) -> np.ndarray:
    """Codes `[..., n]` below 16 as bytes `[..., n / 2]`, which hold the codes i and i + n / 2."""
    low, high = np.split(codes.astype(np.uint8), 2, axis=-1)
    return low | high << 4


def _sum(values: np.ndarray) -> np.ndarray:
    return values.sum(-1, keepdims=True, dtype=np.float32)


def _weights(x: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """The weights of squared errors: larger values of a block count more. A part of a block that is
    never used counts by its values alone."""
    squares = x * x
    spread = squares.mean(tuple(range(1, x.ndim)), keepdims=True, dtype=np.float32)
    size = np.sqrt(2 * spread + squares)
    importance = importance.reshape(x.shape)
    is_used = importance.max(-1, keepdims=True) > 0
    found: np.ndarray = np.where(is_used, importance, 1) * size
    return found


def _fit_with_min(
    x: np.ndarray, top: int, importance: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima `[..., 1]`, at least 0, with which codes from 0 to `top` represent x best:
    x is about scale * code - min."""
    if importance is None:
        weight = np.sqrt(_sum(x * x) / x.shape[-1]) + np.abs(x)
    else:
        weight = _weights(x, importance)
    low = np.minimum(x.min(-1, keepdims=True), 0)
    span = x.max(-1, keepdims=True) - low
    best_scale, best_min = span / np.float32(top), -low
    best_error = np.full_like(span, np.inf)
    total, weighted = _sum(weight), _sum(weight * x)
    for step in range(-1, _TRIES):
        inverse = _ratio(np.full_like(span, top + 0.1 * (step - _TRIES // 2)), span)
        code = np.rint(inverse * (x - low)).clip(0, top)
        # The scale and minimum of least squares for these codes.
        squares, codes = _sum(weight * code * code), _sum(weight * code)
        products = _sum(weight * code * x)
        determinant = total * squares - codes * codes
        scale = _ratio(total * products - weighted * codes, determinant)
        least = _ratio(squares * weighted - codes * products, determinant)
        is_positive = least > 0
        scale = np.where(is_positive, _ratio(products, squares), scale)
        least = np.where(is_positive, 0, least)
        error = _sum(weight * (scale * code + least - x) ** 2)
        is_better = (error < best_error) & (scale > 0)
        best_scale = np.where(is_better, scale, best_scale)
        best_min = np.where(is_better, -least, best_min)
        best_error = np.where(is_better, error, best_error)
    return best_scale, best_min


def _fit(
    x: np.ndarray,
    first: float,
    nearest: Callable[[np.ndarray], np.ndarray],
    importance: np.ndarray | None,
) -> np.ndarray:
    """Scales `[..., 1]` of either sign with which the numbers of a format represent x best.

    Args:
        x: float32 `[..., values]`.
        first: The number of the largest magnitude.
        nearest: Maps values to the nearest numbers.
        importance: The weights of squared errors, as many numbers as x has; None: x².
    """
    weight = x * x if importance is None else _weights(x, importance)
    extreme = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    best_scale, best_gain = np.zeros_like(extreme), np.zeros_like(extreme)
    for step in range(-_SIGNED_TRIES, _SIGNED_TRIES + 1):
        inverse = _ratio(np.full_like(extreme, first * (1 + 0.016 * step)), extreme)
        near = nearest(inverse * x)
        products, squares = _sum(weight * near * x), _sum(weight * near * near)
        gain = _ratio(products * products, squares)
        is_better = gain > best_gain
        best_scale = np.where(is_better, _ratio(products, squares), best_scale)
        best_gain = np.where(is_better, gain, best_gain)
    return best_scale


_IQ4 = np.array(IQ4_VALUES, np.float32)
#: The code of the nearest value for each number of halves from -256 to 255, rounded down.
_IQ4_CODES = np.searchsorted((_IQ4[1:] + _IQ4[:-1]) / 2, np.arange(-256, 256) / 2, "right").astype(
    np.uint8
)


def _iq4_codes(x: np.ndarray) -> np.ndarray:
    """The codes of the nearest values of IQ4_NL and IQ4_XS."""
    return _IQ4_CODES[np.floor(2 * x).clip(-256, 255).astype(np.int16) + 256]


def _inverse(scale: np.ndarray) -> np.ndarray:
    return _ratio(np.ones_like(scale), scale)


def _q5(has_min: bool, x: np.ndarray) -> np.ndarray:
    if has_min:
        low = x.min(1, keepdims=True)
        scale = (x.max(1, keepdims=True) - low) / np.float32(31)
        codes = np.trunc((x - low) * _inverse(scale) + np.float32(0.5))
        heads = _halves(scale, low)
    else:
        extreme = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)
        scale = extreme / np.float32(-16)
        codes = np.trunc(x * _inverse(scale) + np.float32(16.5))
        heads = _halves(scale)
    return _packed(codes.clip(0, 31).astype(np.uint8), 5, heads)


def _packed(code: np.ndarray, bits: int, heads: np.ndarray) -> np.ndarray:
    """Blocks of 32 codes of 4 or 5 bits behind their scales."""
    if bits == 4:
        return np.concatenate((heads, _paired(code)), 1)
    high = np.packbits(code >> 4, axis=1, bitorder="little")
    return np.concatenate((heads, high, _paired(code & 15)), 1)


def _weighed_signed(bits: int, x: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """Q4_0 and Q5_0 with an importance matrix."""
    half = 1 << (bits - 1)
    numbers = partial(np.clip, a_min=-half, a_max=half - 1)
    scale = _fit(x, -half, lambda x: numbers(np.rint(x)), importance)
    codes = numbers(np.rint(x * _inverse(_stored(scale)))) + half
    return _packed(codes.astype(np.uint8), bits, _halves(scale))


def _weighed_with_min(bits: int, x: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """Q4_1 and Q5_1 with an importance matrix."""
    top = (1 << bits) - 1
    scale, least = _fit_with_min(x, top, importance)
    codes = np.rint((x + _stored(least)) * _inverse(_stored(scale))).clip(0, top)
    return _packed(codes.astype(np.uint8), bits, _halves(scale, -least))


def _k45(format: str, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """Q4_K and Q5_K: eight parts with six-bit scales and minima."""
    top = 15 if format == "Q4_K" else 31
    parts = x.reshape(-1, 8, 32)
    scales, minima = (fit[..., 0] for fit in _fit_with_min(parts, top, importance))
    scale, least = (part.max(1, keepdims=True) / np.float32(63) for part in (scales, minima))
    scale_codes = np.rint(scales * _inverse(scale)).astype(np.uint8)
    min_codes = np.rint(minima * _inverse(least)).astype(np.uint8)
    steps = (_stored(scale) * scale_codes)[..., None]
    offsets = (_stored(least) * min_codes)[..., None]
    codes = np.rint((parts + offsets) * _inverse(steps)).clip(0, top).astype(np.uint8)
    first, last, low, high = (
        scale_codes[:, :4],
        scale_codes[:, 4:],
        min_codes[:, :4],
        min_codes[:, 4:],
    )
    packed = [
        _halves(scale, least),
        first | (last >> 4) << 6,
        low | (high >> 4) << 6,
        (last & 15) | (high & 15) << 4,
    ]
    if top == 31:
        packed.append(np.packbits(codes >> 4, axis=1, bitorder="little").reshape(-1, 32))
    nibbles = (codes & 15).reshape(-1, 4, 2, 32)
    packed.append((nibbles[:, :, 0] | nibbles[:, :, 1] << 4).reshape(-1, 128))
    return np.concatenate(packed, 1)


def _four_each(codes: np.ndarray) -> np.ndarray:
    """Codes `[blocks, 256]` below 4 as bytes `[blocks, 64]`: those of every 32 values side by
    side."""
    quarters = codes.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return np.bitwise_or.reduce(quarters, axis=2).reshape(-1, 64)


def _q2_k(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """16 parts with four-bit scales and minima."""
    parts = x.reshape(-1, 16, 16)
    scales, minima = (fit[..., 0] for fit in _fit_with_min(parts, 3, importance))
    scale, least = (part.max(1, keepdims=True) / np.float32(15) for part in (scales, minima))
    scale_codes = np.rint(scales * _inverse(scale)).astype(np.uint8)
    min_codes = np.rint(minima * _inverse(least)).astype(np.uint8)
    steps = (_stored(scale) * scale_codes)[..., None]
    offsets = (_stored(least) * min_codes)[..., None]
    codes = np.rint((parts + offsets) * _inverse(steps)).clip(0, 3).astype(np.uint8)
    packed = _four_each(codes.reshape(-1, 256))
    return np.concatenate((scale_codes | min_codes << 4, packed, _halves(scale, least)), 1)


def _q3_k(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """16 parts with six-bit scales of either sign."""
    parts = x.reshape(-1, 16, 16)
    numbers = partial(np.clip, a_min=-4, a_max=3)
    scales = _fit(parts, -4, lambda x: numbers(np.rint(x)), importance)[..., 0]
    extreme = np.take_along_axis(scales, np.abs(scales).argmax(1)[:, None], 1)
    scale = extreme / np.float32(-32)
    stored = np.rint(scales * _inverse(scale)).clip(-32, 31)
    steps = (_stored(scale) * stored)[..., None]
    codes = (numbers(np.rint(parts * _inverse(steps))) + 4).astype(np.uint8).reshape(-1, 256)
    six = (stored + 32).astype(np.uint8)
    low = six[:, :8] & 15 | (six[:, 8:] & 15) << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce((six >> 4).reshape(-1, 4, 4) << shifts, axis=1)
    eighths = (codes >> 2).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    masks = np.bitwise_or.reduce(eighths, axis=1)
    return np.concatenate((masks, _four_each(codes & 3), low, high, _halves(scale)), 1)


def _q6_k(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    parts = x.reshape(-1, 16, 16)
    scales = _fit(parts, -32, lambda x: np.rint(x).clip(-32, 31), importance)[..., 0]
    extreme = np.take_along_axis(scales, np.abs(scales).argmax(1)[:, None], 1)
    scale = extreme / np.float32(-128)
    scale_codes = np.rint(scales * _inverse(scale)).clip(-128, 127).astype(np.int8)
    steps = (_stored(scale) * scale_codes)[..., None]
    codes = np.rint(parts * _inverse(steps)).clip(-32, 31) + 32
    quarters = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce((quarters >> 4) << shifts, axis=2)
    rows = len(x)
    return np.concatenate(
        (low.reshape(rows, -1), high.reshape(rows, -1), scale_codes.view(np.uint8), _halves(scale)),
        1,
    )


def _iq4_nl(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    scale = _fit(x, _IQ4[0], lambda numbers: _IQ4[_iq4_codes(numbers)], importance)
    codes = _iq4_codes(x * _inverse(_stored(scale)))
    return np.concatenate((_halves(scale), _paired(codes)), 1)


def _iq4_xs(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    parts = x.reshape(-1, 8, 32)
    scales = _fit(parts, _IQ4[0], lambda x: _IQ4[_iq4_codes(x)], importance)[..., 0]
    extreme = np.take_along_axis(scales, np.abs(scales).argmax(1)[:, None], 1)
    scale = extreme / np.float32(-32)
    stored = np.rint(scales * _inverse(scale)).clip(-32, 31)
    steps = (_stored(scale) * stored)[..., None]
    codes = _iq4_codes(parts * _inverse(steps))
    six = (stored + 32).astype(np.uint16)
    low, high = six & 15, six >> 4
    upper = np.bitwise_or.reduce(high << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    heads = (_halves(scale), upper[:, None].view(np.uint8))
    lower = (low[:, 0::2] | low[:, 1::2] << 4).astype(np.uint8)
    return np.concatenate((*heads, lower, _paired(codes).reshape(-1, 128)), 1)


def _mxfp4(x: np.ndarray) -> np.ndarray:
    largest = np.abs(x).max(1, keepdims=True)
    with np.errstate(divide="ignore"):
        exponent = np.where(largest > 0, np.floor(np.log2(largest)) + 125, 0).clip(0, 254)
    scale = np.ldexp(np.float32(1), exponent.astype(np.int32) - 128)
    errors = np.abs(scale[..., None] * np.array(MXFP4_VALUES, np.float32) - x[..., None])
    codes = errors.argmin(-1)
    return np.concatenate((exponent.astype(np.uint8), _paired(codes)), 1)


#: The numbers of the codes of E4M3 without a sign, all but the one that is no number.
_E4M3 = 2 * e4m3(np.arange(127, dtype=np.uint8))
_FP4 = np.array(MXFP4_VALUES[:8], np.float32) / 2
_FP4_LIMITS = (_FP4[1:] + _FP4[:-1]) / 2
#: The codes of scales that are tried, from that which maps the largest magnitude to 6. Five codes
#: further, it is mapped to 4.
_FP4_TRIES = range(-2, 7)


def _nvfp4(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """Four parts of 16 numbers with a scale in E4M3; there is no factor of a whole matrix."""
    parts = x.reshape(-1, 4, 16)
    weight = np.ones_like(parts) if importance is None else _weights(parts, importance)
    magnitude = np.abs(parts)
    first = np.searchsorted((_E4M3[1:] + _E4M3[:-1]) / 2, magnitude.max(-1) / 6)
    best = np.zeros(first.shape, np.int64)
    best_error = _sum(weight * parts * parts)[..., 0]  # of a scale of 0
    for step in _FP4_TRIES:
        scales = (first + step).clip(1, len(_E4M3) - 1)
        scale = _E4M3[scales][..., None]
        near = _FP4[np.searchsorted(_FP4_LIMITS, magnitude / scale)] * scale
        error = _sum(weight * (near - magnitude) ** 2)[..., 0]
        is_better = error < best_error
        best = np.where(is_better, scales, best)
        best_error = np.where(is_better, error, best_error)
    scaled = magnitude * _inverse(_E4M3[best])[..., None]
    codes = np.searchsorted(_FP4_LIMITS, scaled).astype(np.uint8) | np.signbit(parts) * np.uint8(8)
    return np.concatenate((best.astype(np.uint8), _paired(codes).reshape(-1, 32)), 1)


def _ternary(format: str, x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(1, keepdims=True)
    scaled = np.abs(x * _inverse(scale))
    codes = (np.sign(x) * np.floor(scaled + np.float32(0.5)) + 1).astype(np.uint8)
    if format == "TQ2_0":
        four = codes.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
        return np.concatenate(
            (np.bitwise_or.reduce(four, axis=2).reshape(-1, 64), _halves(scale)), 1
        )
    powers = np.array([81, 27, 9, 3, 1], np.uint16)[:, None]
    parts = (codes[:, :160], 32), (codes[:, 160:240], 16), (codes[:, 240:], 4)
    digits = [part.reshape(len(x), -1, width) for part, width in parts]
    sums = np.concatenate([(part * powers[: part.shape[1]]).sum(1) for part in digits], 1)
    # The digits as a fraction of 256, rounded up.
    return np.concatenate((((sums * 256 + 242) // 243).astype(np.uint8), _halves(scale)), 1)


_ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q5_0": partial(_q5, False),
    "Q5_1": partial(_q5, True),
    "MXFP4": _mxfp4,
    "TQ1_0": partial(_ternary, "TQ1_0"),
    "TQ2_0": partial(_ternary, "TQ2_0"),
}


def _grid(format: str, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    parts = x.reshape(-1, 8, 32)
    weight = np.ones_like(parts) if importance is None else _weights(parts, importance)
    return grid_encoders.encode_blocks(format, x, weight.reshape(x.shape))


#: The encoders that always search for scales.
SEARCHED: dict[str, Callable[[np.ndarray, np.ndarray | None], np.ndarray]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": partial(_k45, "Q4_K"),
    "Q5_K": partial(_k45, "Q5_K"),
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "NVFP4": _nvfp4,
    **{format: partial(_grid, format) for format in grid_encoders.FORMATS},
}

#: The encoders that weigh errors by an importance matrix.
WEIGHED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    **SEARCHED,
    "Q4_0": partial(_weighed_signed, 4),
    "Q5_0": partial(_weighed_signed, 5),
    "Q4_1": partial(_weighed_with_min, 4),
    "Q5_1": partial(_weighed_with_min, 5),
}

#: The block formats that can be encoded.
FORMATS = (*QUANTIZABLE, *_ENCODERS, *SEARCHED)
