"""Formats of the key-value cache, and conversion of keys and values to and from them.

Each head's vector is stored separately, so the stored form of a position does not depend on other
positions. "int8" and "int4" store blocks of 32 numbers with a scale per block, in GGUF's layouts
Q8_0 and Q4_1: 34 and 20 bytes per block. Vectors are padded with zeros to whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from anydecode.errors import InvalidRequestError
from anydecode.kernels.formats import BLOCKS, dequantize
from anydecode.kernels.interface import Attention, KeyValues, Weight
from anydecode.kernels.pages import map_anonymous

#: Cache format -> the weight format with the same layout.
CACHE_FORMATS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "Q8_0",
    "int4": "Q4_1",
}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def new_cache(
    format: str | torch.dtype,
    num_slots: int,
    shapes: Sequence[Attention],
    device: torch.device | str = "cpu",
) -> KeyValues:
    """A key-value cache of zeros.

    Args:
        format: A name of `CACHE_FORMATS`, or the torch dtype of the same name.
        num_slots: Number of positions.
        shapes: The attention of each layer.
        device: Where the tensors are allocated.

    Raises:
        InvalidRequestError: The format is unknown.
    """
    name = format if isinstance(format, str) else str(format).removeprefix("torch.")
    if name not in CACHE_FORMATS:
        raise InvalidRequestError(
            f"there is no cache format {name!r}; allowed are {', '.join(CACHE_FORMATS)}"
        )

    def empty(shape: Attention) -> torch.Tensor:
        width = shape.head_dim if name in _DTYPES else _head_bytes(name, shape.head_dim)
        dtype = _DTYPES.get(name, torch.uint8)
        if torch.device(device).type != "cpu":
            size = (num_slots, shape.num_kv_heads, width)
            return torch.zeros(size, dtype=dtype, device=device)
        # Each head's slots are contiguous, so that consecutive slots are read sequentially.
        size = (shape.num_kv_heads, num_slots, width)
        buffer = map_anonymous(max(1, math.prod(size) * dtype.itemsize))
        flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(size))
        return flat.view(size).transpose(0, 1)

    return KeyValues([empty(s) for s in shapes], [empty(s) for s in shapes], name)


def bytes_per_position(cache: KeyValues) -> int:
    """Bytes of one position in all layers of a cache."""
    tensors = (*cache.keys, *cache.values)
    return sum(t[:1].numel() * t.element_size() for t in tensors)


def encode(format: str, x: torch.Tensor) -> torch.Tensor:
    """Convert float32 vectors `[..., head_dim]` to a cache format, `[..., head_dim or bytes]`."""
    if format in _DTYPES:
        return x.to(_DTYPES[format])
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32))
    blocks = _int8_blocks if format == "int8" else _int4_blocks
    return blocks(padded.reshape(-1, 32)).view(*x.shape[:-1], -1)


def decode(format: str, stored: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Convert vectors in a cache format back to float32 `[..., head_dim]`."""
    if format in _DTYPES:
        return stored.to(torch.float32)
    flat = stored.reshape(-1, stored.shape[-1])
    name = CACHE_FORMATS[format]
    width = stored.shape[-1] // BLOCKS[name][1] * 32
    values = dequantize(Weight(name, len(flat), width, flat))
    return values.view(*stored.shape[:-1], width)[..., :head_dim]


def _head_bytes(format: str, head_dim: int) -> int:
    return -(-head_dim // 32) * BLOCKS[CACHE_FORMATS[format]][1]


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float16).view(torch.uint8)


def _int8_blocks(x: torch.Tensor) -> torch.Tensor:
    amax = x.abs().amax(1, keepdim=True)
    inverse = torch.where(amax > 0, 127.0 / amax, torch.zeros_like(amax))
    codes = torch.round(x * inverse).to(torch.int8).view(torch.uint8)
    return torch.cat((_half(amax / 127.0), codes), 1)


def _int4_blocks(x: torch.Tensor) -> torch.Tensor:
    low = x.amin(1, keepdim=True)
    scale = (x.amax(1, keepdim=True) - low) / 15.0
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    codes = torch.round((x - low) * inverse).clamp(0, 15).to(torch.uint8)
    return torch.cat((_half(scale), _half(low), codes[:, :16] | codes[:, 16:] << 4), 1)
