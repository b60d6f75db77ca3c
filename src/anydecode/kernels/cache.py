"""Formats of the key-value cache: what a position's key and value are kept as.

A head's vector stands by itself, so what a row sees of a position depends on that position alone.
"int8" and "int4" keep blocks of 32 numbers with their own scale, in GGUF's layouts Q8_0 and Q4_1:
34 and 20 bytes. Vectors that do not divide into blocks are padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from anydecode.errors import InvalidRequestError
from anydecode.kernels.formats import BLOCKS, dequantize
from anydecode.kernels.interface import Attention, KeyValues, Weight
from anydecode.kernels.pages import anonymous

#: name -> the weight format with the same bytes
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
    """Zeroed keys and values of `num_slots` positions, one layer for each of `shapes`."""
    name = format if isinstance(format, str) else str(format).removeprefix("torch.")
    if name not in CACHE_FORMATS:
        raise InvalidRequestError(
            f"there is no cache format {name!r}; choose from {', '.join(CACHE_FORMATS)}"
        )

    def empty(shape: Attention) -> torch.Tensor:
        width = shape.head_dim if name in _DTYPES else _head_bytes(name, shape.head_dim)
        dtype = _DTYPES.get(name, torch.uint8)
        if torch.device(device).type != "cpu":
            size = (num_slots, shape.num_kv_heads, width)
            return torch.zeros(size, dtype=dtype, device=device)
        # A head's vectors stand together, so that neighbouring slots are read as one stream.
        size = (shape.num_kv_heads, num_slots, width)
        room = anonymous(max(1, math.prod(size) * dtype.itemsize))
        flat = torch.frombuffer(room, dtype=dtype, count=math.prod(size))
        return flat.view(size).transpose(0, 1)

    return KeyValues([empty(s) for s in shapes], [empty(s) for s in shapes], name)


def bytes_per_position(cache: KeyValues) -> int:
    """What one position takes in all layers."""
    tensors = (*cache.keys, *cache.values)
    return sum(t[:1].numel() * t.element_size() for t in tensors)


def encode(format: str, x: torch.Tensor) -> torch.Tensor:
    """Vectors float32 `[..., head_dim]` as the cache keeps them."""
    if format in _DTYPES:
        return x.to(_DTYPES[format])
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32))
    blocks = _int8_blocks if format == "int8" else _int4_blocks
    return blocks(padded.reshape(-1, 32)).view(*x.shape[:-1], -1)


def decode(format: str, stored: torch.Tensor, head_dim: int) -> torch.Tensor:
    """float32 `[..., head_dim]`"""
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
    most = x.abs().amax(1, keepdim=True)
    inverse = torch.where(most > 0, 127.0 / most, torch.zeros_like(most))
    codes = torch.round(x * inverse).to(torch.int8).view(torch.uint8)
    return torch.cat((_half(most / 127.0), codes), 1)


def _int4_blocks(x: torch.Tensor) -> torch.Tensor:
    low = x.amin(1, keepdim=True)
    scale = (x.amax(1, keepdim=True) - low) / 15.0
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    codes = torch.round((x - low) * inverse).clamp(0, 15).to(torch.uint8)
    return torch.cat((_half(scale), _half(low), codes[:, :16] | codes[:, 16:] << 4), 1)
