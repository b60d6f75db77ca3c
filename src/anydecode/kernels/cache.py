"""Formats of the key-value cache, and conversion of keys and values to and from them.

Each head's vector is stored separately, so the stored form of a position does not depend on other
positions. "int8" and "int4" store blocks of 32 numbers with a scale per block, in GGUF's layouts
Q8_0 and Q4_1: 34 and 20 bytes per block. Vectors are padded with zeros to whole blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from anydecode.errors import InvalidRequestError
from anydecode.kernels.formats import BLOCKS, DTYPES, dequantize
from anydecode.kernels.interface import Attention, KeyValues, Recurrence, Weight
from anydecode.kernels.mapped import mapped_zeros
from anydecode.kernels.recurrent import StatePool

#: Cache format -> the weight format with the same layout.
CACHE_FORMATS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "Q8_0",
    "int4": "Q4_1",
}


def new_cache(
    format: str,
    num_slots: int,
    shapes: Sequence[Attention | None],
    recurrences: Mapping[int, Recurrence] = MappingProxyType({}),
) -> KeyValues:
    """A key-value cache of zeros in main memory.

    Args:
        format: A name of `CACHE_FORMATS`.
        num_slots: Number of positions.
        shapes: The attention of each layer; None: it has none.
        recurrences: The recurrence of each layer that has one.

    Raises:
        InvalidRequestError: The format is unknown.
    """
    check_cache_format(format)

    def empty(shape: Attention | None, is_value: bool) -> np.ndarray:
        dtype = cache_dtype(format)
        heads, dim = stored_heads(shape, is_value)
        if not dim:
            return np.empty((num_slots, 1, 0), dtype)
        # Each head's slots are contiguous, so that consecutive slots are read sequentially.
        size = (heads, num_slots, stored_width(format, dim))
        return mapped_zeros(size, dtype).swapaxes(0, 1)

    inputs = {
        layer: mapped_zeros((num_slots, shape.num_inputs), np.dtype(np.float32))
        for layer, shape in recurrences.items()
    }
    has_states = any(shape.state_shape for shape in recurrences.values())
    states = StatePool(recurrences) if has_states else None
    keys, values = ([empty(shape, is_value) for shape in shapes] for is_value in (False, True))
    return KeyValues(keys, values, format, inputs, states)


def stored_heads(shape: Attention | None, is_value: bool) -> tuple[int, int]:
    """The number of heads whose keys or values a slot has, and the numbers of each. The key of an
    indexer is one more head of the values, and the only one with latent attention."""
    if shape is None:
        return 1, 0
    if not is_value:
        return shape.num_stored_keys, shape.head_dim
    if shape.latent_dim is not None:
        return 1, shape.index_dim or 0
    return shape.num_kv_heads + (shape.index_dim is not None), shape.head_dim


def check_cache_format(format: str) -> None:
    """Raise InvalidRequestError if `format` is not a name of `CACHE_FORMATS`."""
    if format not in CACHE_FORMATS:
        raise InvalidRequestError(
            f"there is no cache format {format!r}; allowed are {', '.join(CACHE_FORMATS)}"
        )


def cache_dtype(format: str) -> np.dtype[Any]:
    """The dtype of stored vectors: bytes where the format is packed."""
    return DTYPES.get(CACHE_FORMATS[format], np.dtype(np.uint8))


def stored_width(format: str, head_dim: int) -> int:
    """Numbers, or bytes where the format is packed, of one head's vector."""
    values, size = BLOCKS[CACHE_FORMATS[format]]
    return head_dim if values == 1 else -(-head_dim // values) * size


def number_bytes(format: str) -> float:
    """Bytes of one number in a cache format, scales of blocks included.

    Raises:
        InvalidRequestError: The format is unknown.
    """
    check_cache_format(format)
    return stored_width(format, 32) * cache_dtype(format).itemsize / 32


def bytes_per_position(cache: KeyValues) -> int:
    """Bytes of one position in all layers of a cache."""
    return sum(x.nbytes // max(1, len(x)) for x in cache.arrays)


def encode(format: str, x: np.ndarray) -> np.ndarray:
    """Convert float32 vectors `[..., head_dim]` to a cache format, `[..., head_dim or bytes]`."""
    if CACHE_FORMATS[format] in DTYPES:
        with np.errstate(over="ignore"):
            return x.astype(cache_dtype(format))
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)]
    blocks = _int8_blocks if format == "int8" else _int4_blocks
    with np.errstate(all="ignore"):  # infinities and NaN pass through
        packed = blocks(np.pad(x, padding).reshape(-1, 32))
    return packed.reshape(*x.shape[:-1], stored_width(format, x.shape[-1]))


def round_queries(format: str, q: np.ndarray) -> np.ndarray:
    """Queries float32 `[..., head_dim]` as attention over a cache of this format reads them: for
    "int8" rounded to 8 bits, in blocks of 32 numbers as keys are, with scales in float32."""
    if format != "int8":
        return q
    padding = [(0, 0)] * (q.ndim - 1) + [(0, -q.shape[-1] % 32)]
    padded = np.pad(q, padding)
    with np.errstate(all="ignore"):  # infinities and NaN pass through
        codes, scales = _int8_codes(padded.reshape(-1, 32))
    return (codes * scales).reshape(padded.shape)[..., : q.shape[-1]]


def decode(format: str, stored: np.ndarray, head_dim: int) -> np.ndarray:
    """Convert vectors in a cache format back to float32 `[..., head_dim]`."""
    name = CACHE_FORMATS[format]
    if name in DTYPES:
        return stored.astype(np.float32)
    flat = stored.reshape(-1, stored.shape[-1])
    width = stored.shape[-1] // BLOCKS[name][1] * 32
    values = dequantize(Weight(name, len(flat), width, flat))
    return values.reshape(*stored.shape[:-1], width)[..., :head_dim]


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, 0 where the scale is 0."""
    return np.where(scale > 0, np.float32(1) / scale, np.float32(0))


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint8)


def _int8_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 32 numbers as whole numbers up to 127 (int8) and their scales `[blocks, 1]`."""
    largest = np.abs(x).max(1, keepdims=True)
    inverse = np.where(largest > np.float32(4e-37), np.float32(127) / largest, np.float32(0))
    return np.rint(x * inverse).astype(np.int8), largest / np.float32(127.0)


def _int8_blocks(x: np.ndarray) -> np.ndarray:
    codes, scales = _int8_codes(x)
    return np.concatenate((_half(scales), codes.view(np.uint8)), 1)


def _int4_blocks(x: np.ndarray) -> np.ndarray:
    low = x.min(1, keepdims=True)
    scale = (x.max(1, keepdims=True) - low) / np.float32(15.0)
    codes = np.rint((x - low) * _inverse(scale)).clip(0, 15).astype(np.uint8)
    return np.concatenate((_half(scale), _half(low), codes[:, :16] | codes[:, 16:] << 4), 1)
