"""Blocks of GGUF's formats IQ1, IQ2 and IQ3: a search for scales and for points of a grid.

Parts of a block share a scale, and groups of four or eight of their values are a point of the grid.
Several scales are tried for each part. For each of them the best point of every group is found by
comparing all, and the scale of least squares for these points is what counts. The scales are then
rounded to whole multiples of that of the block, and the points are searched again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from anydecode.kernels.grids import grid

#: Largest magnitudes of a part over the largest number of the grid: the scales that are tried.
_TRIES = (1.15, 1.0, 0.88, 0.78, 0.69, 0.61, 0.54)
#: Groups whose distances to all points are computed at once.
_NUM_GROUPS = 1 << 8


class _Layout(NamedTuple):
    """The parts of a format's blocks of 256 values.

    Attributes:
        part: The number of values that share a scale.
        top: The largest code of a scale; code c is 2 c + 1 times the scale of the block.
        unit: The number by which the stored scale of the block is multiplied.
        is_even: Whether an even number of each eight values is negative.
        shift: The number of values whose points are moved in the same direction; 0: none are.
    """

    part: int
    top: int
    unit: float
    is_even: bool = False
    shift: int = 0


_LAYOUTS = {
    "IQ1_S": _Layout(32, 7, 0.125, shift=32),
    "IQ1_M": _Layout(16, 7, 0.125, shift=8),
    "IQ2_XXS": _Layout(32, 15, 0.125, is_even=True),
    "IQ2_XS": _Layout(16, 15, 0.125, is_even=True),
    "IQ2_S": _Layout(16, 15, 0.125),
    "IQ3_XXS": _Layout(32, 15, 0.25, is_even=True),
    "IQ3_S": _Layout(32, 15, 1.0),
}
FORMATS = (*_LAYOUTS,)


def encode_blocks(format: str, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Blocks of a format.

    Args:
        format: One of `FORMATS`.
        x: float32 `[blocks, 256]`.
        weight: The weights of squared errors, float32 `[blocks, 256]`, at least 0.

    Returns:
        uint8 `[blocks, bytes]`.
    """
    layout, num_blocks = _LAYOUTS[format], len(x)
    negative = np.zeros(x.shape, bool)
    if not layout.shift:
        negative = _signs(x, weight, layout.is_even)
        x = np.where(negative, -x, x)
    points = _points(format)
    groups = x.reshape(-1, points.shape[-1]), weight.reshape(-1, points.shape[-1])
    search = _Search(*groups, points, layout)
    scales = search.best_scales().reshape(num_blocks, -1)
    largest = scales.max(1, keepdims=True) / np.float32(2 * layout.top + 1)
    codes = np.zeros(scales.shape, np.int32)
    stored = _stored(largest / layout.unit)
    for _ in range(2):
        block = stored * np.float32(layout.unit)
        ratio = np.divide(scales, block, out=np.zeros_like(scales), where=block > 0)
        codes = np.rint((ratio - 1) / 2).clip(0, layout.top).astype(np.int32)
        steps = 2 * codes.astype(np.float32) + 1
        products, squares = search.sums(search.indices((block * steps).ravel()))
        products, squares = (part.reshape(num_blocks, -1) for part in (products, squares))
        # The scale of least squares for these codes and points.
        best = _ratio((products * steps).sum(1), (squares * steps * steps).sum(1))[:, None]
        stored = _stored(np.maximum(best, 0) / layout.unit)
    steps = 2 * codes.astype(np.float32) + 1
    indices = search.indices((stored * np.float32(layout.unit) * steps).ravel())
    num_points = len(grid(format))
    indices = indices.reshape(num_blocks, -1)
    signs = np.packbits(negative, axis=1, bitorder="little")
    directions = (indices // num_points).astype(np.uint16)
    indices = (indices % num_points).astype(np.uint16)
    return _PACKERS[format](stored.astype(np.float16), codes, indices, signs, directions)


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def _stored(scale: np.ndarray) -> np.ndarray:
    return scale.astype(np.float16).astype(np.float32)


def _signs(x: np.ndarray, weight: np.ndarray, is_even: bool) -> np.ndarray:
    """Which values are negative. If their number has to be even in each eight values, the sign of
    the value that matters least changes."""
    negative = x < 0
    if is_even:
        eights = negative.reshape(-1, 8)
        cost = (weight * x * x).reshape(-1, 8)
        odd = np.flatnonzero(eights.sum(1) % 2)
        least = cost[odd].argmin(1)
        eights[odd, least] = ~eights[odd, least]
    return negative


@cache
def _points(format: str) -> np.ndarray:
    """The points of a format in each direction, float32 `[directions, points, 8 or 4]`."""
    found = grid(format).astype(np.float32)
    return np.stack([found + 1, found - 1] if _LAYOUTS[format].shift else [found])


class _Search:
    """The best points of groups of values, for scales of their parts.

    Args:
        x: float32 `[groups, n]`.
        weight: The weights of squared errors, of the same shape.
        points: float32 `[directions, points, n]`.
        layout: The layout of the format.
    """

    def __init__(
        self, x: np.ndarray, weight: np.ndarray, points: np.ndarray, layout: _Layout
    ) -> None:
        size = x.shape[1]
        self._weight, self._product = weight, weight * x
        self._all = points.reshape(-1, size)
        self._num_directions, self._num_points = len(points), points.shape[1]
        self._tables = [np.concatenate((one * one, -2 * one), 1).T.copy() for one in points]
        self._groups = layout.part // size  # of a part
        self._alike = max(1, layout.shift // size)  # groups moved in the same direction
        self._largest = np.abs(x).reshape(-1, layout.part).max(1)
        self._top = np.abs(points).max()

    def indices(self, scales: np.ndarray) -> np.ndarray:
        """The best point of each group, for positive scales of the parts: an index into the points
        of all directions, one direction after the other."""
        scale = scales.repeat(self._groups)[:, None]
        terms = np.concatenate((self._weight * scale, self._product), 1)
        found = np.empty((self._num_directions, len(terms)), np.int64)
        errors = np.empty((self._num_directions, len(terms)), np.float32)
        for start in range(0, len(terms), _NUM_GROUPS):
            part = terms[start : start + _NUM_GROUPS]
            for direction, table in enumerate(self._tables):
                distances = part @ table
                best = distances.argmin(1)
                found[direction, start : start + len(part)] = best + direction * self._num_points
                errors[direction, start : start + len(part)] = distances[np.arange(len(part)), best]
        if self._num_directions == 1:
            return found[0]
        shared = (errors * scale[:, 0]).reshape(self._num_directions, -1, self._alike).sum(2)
        chosen = shared.argmin(0).repeat(self._alike)
        return np.take_along_axis(found, chosen[None], 0)[0]

    def sums(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The weighted products of the values with their points, and the weighted squares of the
        points, of each part."""
        near = self._all[indices]
        products = (self._product * near).reshape(len(self._largest), -1).sum(1)
        return products, (self._weight * near * near).reshape(len(self._largest), -1).sum(1)

    def best_scales(self) -> np.ndarray:
        """The scales of the parts with the least squared error."""
        best, best_gain = np.zeros_like(self._largest), np.zeros_like(self._largest)
        for share in _TRIES:
            products, squares = self.sums(self.indices(self._largest * (share / self._top)))
            gain = _ratio(products * products, squares)
            is_better = (gain > best_gain) & (products > 0)
            best = np.where(is_better, _ratio(products, squares), best)
            best_gain = np.where(is_better, gain, best_gain)
        return best


def _joined(codes: np.ndarray, shifts: Sequence[int], size: int) -> np.ndarray:
    """Codes `[blocks, n * len(shifts)]` as bytes of `n` numbers of `size` bytes, in which each has
    one of the shifts."""
    kind = np.dtype(f"<u{size}")
    parts = codes.reshape(len(codes), -1, len(shifts)).astype(kind) << np.array(shifts, kind)
    return np.ascontiguousarray(np.bitwise_or.reduce(parts, axis=2)).view(np.uint8)


def _pack_iq1_s(
    scale: np.ndarray, codes: np.ndarray, indices: np.ndarray, _: np.ndarray, down: np.ndarray
) -> np.ndarray:
    high = _joined(indices >> 8, (0, 3, 6, 9), 2).view("<u2")
    high |= codes.astype(np.uint16) << 12 | down[:, ::4] << 15
    return np.concatenate((scale.view(np.uint8), indices.astype(np.uint8), high.view(np.uint8)), 1)


def _pack_iq1_m(
    scale: np.ndarray, codes: np.ndarray, indices: np.ndarray, _: np.ndarray, down: np.ndarray
) -> np.ndarray:
    high = _joined(indices >> 8 | down << 3, (0, 4), 1)
    words = _joined(codes, (0, 3, 6, 9), 2).view("<u2")
    quarters = scale.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15
    words |= quarters << 12
    return np.concatenate((indices.astype(np.uint8), high, words.view(np.uint8)), 1)


def _pack_iq2_xxs(
    scale: np.ndarray, codes: np.ndarray, indices: np.ndarray, signs: np.ndarray, _: np.ndarray
) -> np.ndarray:
    points = indices.astype(np.uint8).reshape(len(indices), 8, 4)
    packed = _signs_and_scales(codes, signs).reshape(len(indices), 8, 4)
    both = np.concatenate((points, packed), 2).reshape(len(indices), -1)
    return np.concatenate((scale.view(np.uint8), both), 1)


def _signs_and_scales(codes: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Four times seven signs and the code of a scale, in four bytes each."""
    words = _joined(signs & 127, (0, 7, 14, 21), 4).view("<u4")
    packed: np.ndarray = (words | codes.astype(np.uint32) << 28).view(np.uint8)
    return packed


def _pack_iq2_xs(
    scale: np.ndarray, codes: np.ndarray, indices: np.ndarray, signs: np.ndarray, _: np.ndarray
) -> np.ndarray:
    words = indices | (signs & 127).astype(np.uint16) << 9
    heads = scale.view(np.uint8), np.ascontiguousarray(words).view(np.uint8)
    return np.concatenate((*heads, _joined(codes, (0, 4), 1)), 1)


def _pack_iq2_s(
    scale: np.ndarray, codes: np.ndarray, indices: np.ndarray, signs: np.ndarray, _: np.ndarray
) -> np.ndarray:
    high, scales = _joined(indices >> 8, (0, 2, 4, 6), 1), _joined(codes, (0, 4), 1)
    return np.concatenate((scale.view(np.uint8), indices.astype(np.uint8), signs, high, scales), 1)


def _pack_iq3_xxs(
    scale: np.ndarray, codes: np.ndarray, indices: np.ndarray, signs: np.ndarray, _: np.ndarray
) -> np.ndarray:
    heads = scale.view(np.uint8), indices.astype(np.uint8)
    return np.concatenate((*heads, _signs_and_scales(codes, signs)), 1)


def _pack_iq3_s(
    scale: np.ndarray, codes: np.ndarray, indices: np.ndarray, signs: np.ndarray, _: np.ndarray
) -> np.ndarray:
    high, scales = _joined(indices >> 8, range(8), 1), _joined(codes, (0, 4), 1)
    return np.concatenate((scale.view(np.uint8), indices.astype(np.uint8), high, signs, scales), 1)


_PACKERS = {
    "IQ1_S": _pack_iq1_s,
    "IQ1_M": _pack_iq1_m,
    "IQ2_XXS": _pack_iq2_xxs,
    "IQ2_XS": _pack_iq2_xs,
    "IQ2_S": _pack_iq2_s,
    "IQ3_XXS": _pack_iq3_xxs,
    "IQ3_S": _pack_iq3_s,
}
