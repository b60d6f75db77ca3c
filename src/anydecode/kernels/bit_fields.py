"""Fields of bits in the blocks of weight formats, vectorised in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block, as float32 `[blocks, 1]`."""
    stored = np.ascontiguousarray(blocks[:, start : start + 2])
    return stored.view(np.float16).astype(np.float32)


def flat(codes: np.ndarray) -> np.ndarray:
    """All axes but the first as one."""
    return codes.reshape(len(codes), -1)


def words(blocks: np.ndarray, start: int, stop: int, size: int) -> np.ndarray:
    """Bytes `start` to `stop` as little-endian numbers of `size` bytes `[blocks, count]`."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(f"<u{size}")


def fields(numbers: np.ndarray, shifts: Sequence[int], width: int) -> np.ndarray:
    """The fields of `width` bits at each of `shifts`, of each of the numbers `[blocks, n]` in turn,
    `[blocks, n * len(shifts)]`."""
    shifted = numbers[..., None] >> np.array(shifts, numbers.dtype)
    return flat(shifted & numbers.dtype.type((1 << width) - 1))


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Bytes `[..., width]` as codes `[..., 2, width]`: the low nibbles, then the high ones."""
    return np.stack((codes & 15, codes >> 4), axis=-2)


def bits(codes: np.ndarray, width: int) -> np.ndarray:
    """Bytes `[..., n]` as fields of `width` bits `[..., 8 // width, n]`, lowest first."""
    mask = (1 << width) - 1
    return np.stack([(codes >> shift) & mask for shift in range(0, 8, width)], axis=-2)


def signed(codes: np.ndarray) -> np.ndarray:
    """Bytes as signed numbers, float32."""
    return codes.view(np.int8).astype(np.float32)
