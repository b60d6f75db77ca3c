"""Weights in the layout of the Triton kernels: plain numbers, or codes with separate scales.

A block format becomes an array of codes and arrays of scales and offsets per group, so that a tile
of codes is one aligned load. Nibbles are stored in chunks: byte j of a chunk of `CHUNK` values has
value j in its low half and value j + CHUNK / 2 in its high half. So a kernel multiplies the two
halves one after the other and does not interleave them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from anydecode.kernels.formats import (
    BITSANDBYTES_VALUES,
    BLOCKS,
    DTYPES,
    IQ4_VALUES,
    MXFP4_VALUES,
    dequantize,
    e4m3,
    plain_weight,
    ternary_codes,
)
from anydecode.kernels.grids import GRID_FORMATS, grid_codes
from anydecode.kernels.interface import Weight
from anydecode.kernels.torch_arrays import as_tensor

#: Values in one chunk of nibbles; rows are padded with zeros to whole chunks.
CHUNK = 128

_GROUP = 1 << 22  # matrices are converted in groups of about this many values
_MAX_SCALE = 2.0**14  # scales are stored as float16 up to this value


# A matrix is split into about this many programs, one per multiprocessor of the largest current
# GPUs. The number is fixed, so that a weight's splits do not depend on the GPU.
PROGRAMS = 128
#: (rows of a weight per program, the minimum number of such tiles that a matrix must have).
COLUMNS = ((64, 4 * PROGRAMS), (32, PROGRAMS), (16, 1))
_MAX_SPLITS = 8


@dataclass(frozen=True)
class Tile:
    """How products divide a weight. It alone determines the order of summation.

    `columns` is the number of the weight's rows (columns of the result) per program, `step` the
    number of inputs per step, `splits` the number of splits of the inputs.
    """

    columns: int
    step: int
    splits: int

    @staticmethod
    def of(out_features: int, padded: int, bits: int) -> Tile:
        """The tile of a matrix; it depends on the shape and bits of a code only."""
        columns = next(c for c, min_tiles in COLUMNS if out_features > c * (min_tiles - 1))
        step = CHUNK if bits < 32 else CHUNK // 2
        programs, steps = -(-out_features // columns), -(-padded // step)
        return Tile(columns, step, max(1, min(_MAX_SPLITS, PROGRAMS // programs, steps // 4)))


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix `[out_features, in_features]` on the kernels' device.

    With `bits` 32 or 16, `codes` holds the numbers. With `bits` 8 or 4, a value is
    `((code - zero) * scale + offset) * unit` with `codes` int8 `[out, padded]` or uint8
    `[out, padded / 2]`, `scale` and `offset` float16 `[out, padded / group]` and `unit` a power of
    two with which float16 can represent every scale of a format with super-blocks (to 11 bits; the
    scales of the other formats are exact). `order` is int32 `[in_features]`: which input each
    stored one is; None: they are in order.
    """

    out_features: int
    in_features: int
    bits: int
    codes: torch.Tensor
    tile: Tile
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    group: int = 32
    zero: int = 0
    unit: float = 1.0
    order: torch.Tensor | None = None

    @property
    def padded(self) -> int:
        """Values per stored row, with padding."""
        return self.codes.shape[1] * (2 if self.bits == 4 else 1)

    @property
    def takes_bfloat16(self) -> bool:
        """Whether products round their inputs to bfloat16."""
        return self.bits < 16 or self.codes.dtype == torch.bfloat16

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales, offsets and the order of the inputs."""
        parts = (self.codes, self.scale, self.offset, self.order)
        return sum(p.numel() * p.element_size() for p in parts if p is not None)

    def rows(self, start: int, stop: int) -> Packed:
        """The rows [start, stop), without a copy.

        They have the tile of the whole matrix, so a product with them has the same bits as that
        part of the product with the whole matrix.
        """
        return replace(
            self,
            out_features=stop - start,
            codes=self.codes[start:stop],
            scale=None if self.scale is None else self.scale[start:stop],
            offset=None if self.offset is None else self.offset[start:stop],
        )


def pack(weights: Sequence[Weight], device: torch.device, gated: bool = False) -> Packed:
    """Pack `weights` of the same format, width and order of inputs as one matrix.

    Args:
        weights: The matrices, whose rows are concatenated.
        device: Where the packed matrix is stored.
        gated: Whether the weights are a gate and an up projection that one product computes.
    """
    weights = [_packable(weight) for weight in weights]
    first = weights[0]
    rows, columns = sum(w.out_features for w in weights), first.in_features
    tile_rows = rows // 2 if gated else rows
    if first.format in DTYPES:
        plain = (w.data if w.scale == 1 else dequantize(w) for w in weights)
        parts = [as_tensor(part, device) for part in plain]
        data = (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()
        bits = 8 * data.element_size()
        return Packed(rows, columns, bits, data, Tile.of(tile_rows, columns, bits))
    return _pack_blocks(weights, rows, columns, tile_rows, device)


def _packable(weight: Weight) -> Weight:
    """The weight itself, or a plain one where the kernels lack its format."""
    if weight.format in BITSANDBYTES_VALUES:
        return plain_weight(dequantize(weight).astype(DTYPES["BF16"]), weight.name)
    return weight


def _pack_blocks(
    weights: Sequence[Weight], rows: int, columns: int, tile_rows: int, device: torch.device
) -> Packed:
    split, bits, group, zero = _LAYOUTS[weights[0].format]
    padded = -(-columns // CHUNK) * CHUNK
    width = padded // 2 if bits == 4 else padded
    dtype = torch.uint8 if bits == 4 else torch.int8
    codes = torch.zeros(rows, width, dtype=dtype, device=device)
    scale = torch.zeros(rows, padded // group, dtype=torch.float32, device=device)
    offset: torch.Tensor | None = None
    step, row = max(1, _GROUP // columns), 0
    for weight in weights:
        for start in range(0, weight.out_features, step):
            part = as_tensor(weight.data[start : start + step], device)
            count = len(part)
            blocks = part.reshape(-1, BLOCKS[weight.format][1])
            values, scales, offsets = split(blocks)
            target = torch.zeros(count, padded, dtype=torch.int16, device=device)
            target[:, :columns] = values.reshape(count, columns)
            codes[row : row + count] = _pack_nibbles(target) if bits == 4 else target.to(torch.int8)
            scale[row : row + count, : columns // group] = scales.reshape(count, -1) * weight.scale
            if offsets is not None:
                if offset is None:
                    offset = torch.zeros_like(scale)
                offset[row : row + count, : columns // group] = (
                    offsets.reshape(count, -1) * weight.scale
                )
            row += count
    unit, order = _unit(scale, offset), weights[0].order
    return Packed(
        rows, columns, bits, codes, Tile.of(tile_rows, padded, bits),
        (scale / unit).to(torch.float16),
        None if offset is None else (offset / unit).to(torch.float16), group, zero, unit,
        None if order is None else as_tensor(order, device),
    )  # fmt: skip


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack int16 `[rows, padded]` codes below 16 into bytes, chunk by chunk."""
    halves = codes.view(len(codes), -1, 2, CHUNK // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).to(torch.uint8).flatten(1)


def _unit(scale: torch.Tensor, offset: torch.Tensor | None) -> float:
    """The power of two by which the largest scale or offset is at most `_MAX_SCALE`."""
    largest = float(scale.abs().max()) if scale.numel() else 0.0
    if offset is not None:
        largest = max(largest, float(offset.abs().max()))
    unit = 1.0
    while largest > _MAX_SCALE * unit:
        unit *= 2
    while 0 < 2 * largest <= _MAX_SCALE * unit:
        unit /= 2
    return unit


# The block layouts of `kernels/formats.py`, on the device.


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 `[blocks, 1]`."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Bytes `[..., width]` as codes `[..., 2, width]`: the low nibbles, then the high ones."""
    return torch.stack((codes & 15, codes >> 4), dim=-2)


def _bits(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Bytes `[..., n]` as fields of `width` bits `[..., 8 // width, n]`, lowest first."""
    mask = (1 << width) - 1
    return torch.stack([(codes >> shift) & mask for shift in range(0, 8, width)], dim=-2)


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Five-bit codes: 4 bytes `high` with the top bit of each value, 16 bytes `low` of nibbles."""
    top = _bits(high, 1).transpose(-1, -2).flatten(1)
    return (_nibbles(low).flatten(1) | (top << 4)).to(torch.float32)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets float32 `[blocks, 8, 1]` of Q4_K and Q5_K.

    Twelve bytes hold 8 six-bit scales and 8 six-bit minima: the first four of each in the low six
    bits of bytes 0-3 and 4-7; the last four in the nibbles of bytes 8-11, with their top two bits
    in the top of bytes 0-3 and 4-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    scale = _half(blocks, 0) * scales.to(torch.float32)
    offset = _half(blocks, 2) * minima.to(torch.float32)
    return scale.unsqueeze(-1), offset.unsqueeze(-1)


_Split = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def _q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return _nibbles(blocks[:, 2:]).flatten(1), _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return _nibbles(blocks[:, 4:]).flatten(1), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    codes = _five_bits(blocks[:, 2:6], blocks[:, 6:]).to(torch.int16) - 16
    return codes, _half(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    codes = _five_bits(blocks[:, 4:8], blocks[:, 8:]).to(torch.int16)
    return codes, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return blocks[:, 2:].view(torch.int8), _half(blocks, 0), None


def _q4_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    scale, offset = _k_scales(blocks)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return codes, scale.flatten(1), -offset.flatten(1)


def _q5_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    scale, offset = _k_scales(blocks)
    top = _bits(blocks[:, 16:48], 1)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1, 2)
    return (low | (top << 4)).flatten(1), scale.flatten(1), -offset.flatten(1)


def _q6_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    top = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).to(torch.float32)
    return (low | (top << 4)).to(torch.int16) - 32, scale, None


def _two_bits(codes: torch.Tensor) -> torch.Tensor:
    """The two-bit fields of 64 bytes, `[blocks, 8, 32]`."""
    return _bits(codes.reshape(-1, 2, 32), 2).reshape(-1, 8, 32)


def _q2_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    scale = _half(blocks, 80) * (blocks[:, :16] & 15).to(torch.float32)
    offset = _half(blocks, 82) * (blocks[:, :16] >> 4).to(torch.float32)
    return _two_bits(blocks[:, 16:80]).flatten(1), scale, -offset


def _q3_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    low = _nibbles(blocks[:, 96:104]).flatten(1)
    scales = (low | (_bits(blocks[:, 104:108], 2).flatten(1) << 4)).to(torch.float32) - 32
    codes = _two_bits(blocks[:, 32:96]) | (_bits(blocks[:, :32], 1) << 2)
    return codes.flatten(1).to(torch.int16) - 4, _half(blocks, 108) * scales, None


def _looked_up(values: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int16, device=codes.device)[codes.long()].flatten(1)


def _iq4_nl(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return _looked_up(IQ4_VALUES, _nibbles(blocks[:, 2:])), _half(blocks, 0), None


def _iq4_xs(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    low = _nibbles(blocks[:, 4:8].unsqueeze(-1)).reshape(-1, 8)
    high = _bits(blocks[:, 2:4].unsqueeze(-1), 2).reshape(-1, 8)
    scale = _half(blocks, 0) * ((low | (high << 4)).to(torch.float32) - 32)
    return _looked_up(IQ4_VALUES, _nibbles(blocks[:, 8:].reshape(-1, 8, 16))), scale, None


def _mxfp4(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    exponents = blocks[:, :1].to(torch.int32) - 128
    scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return _looked_up(MXFP4_VALUES, _nibbles(blocks[:, 1:])), scale, None


def _nvfp4(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    scale = as_tensor(e4m3(blocks[:, :4].cpu().numpy()), blocks.device)
    return _looked_up(MXFP4_VALUES, _nibbles(blocks[:, 4:].reshape(-1, 4, 8))), scale, None


def _ternary(
    format: str, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    codes = ternary_codes(format, blocks.cpu().numpy()) + np.int8(1)
    scale = _half(blocks, BLOCKS[format][1] - 2).expand(-1, 8)
    return as_tensor(codes, blocks.device), scale, None


def _gridded(
    format: str, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    codes, scale = grid_codes(format, blocks.cpu().numpy())
    scale = scale.repeat(16 // scale.shape[1], axis=1)
    return as_tensor(codes, blocks.device), as_tensor(scale, blocks.device), None


#: Format -> (function that unpacks its blocks, bits per packed code, values per scale, code of
#: zero).
_LAYOUTS: dict[str, tuple[_Split, int, int, int]] = {
    "Q4_0": (_q4_0, 4, 32, 8),
    "Q4_1": (_q4_1, 4, 32, 0),
    "Q4_K": (_q4_k, 4, 32, 0),
    "Q5_0": (_q5_0, 8, 32, 0),
    "Q5_1": (_q5_1, 8, 32, 0),
    "Q5_K": (_q5_k, 8, 32, 0),
    "Q6_K": (_q6_k, 8, 16, 0),
    "Q8_0": (_q8_0, 8, 32, 0),
    "Q2_K": (_q2_k, 8, 16, 0),
    "Q3_K": (_q3_k, 8, 16, 0),
    "IQ4_NL": (_iq4_nl, 8, 32, 0),
    "IQ4_XS": (_iq4_xs, 8, 32, 0),
    "MXFP4": (_mxfp4, 8, 32, 0),
    "NVFP4": (_nvfp4, 8, 16, 0),
    "TQ1_0": (partial(_ternary, "TQ1_0"), 4, 32, 1),
    "TQ2_0": (partial(_ternary, "TQ2_0"), 4, 32, 1),
    **{format: (partial(_gridded, format), 8, 16, 0) for format in GRID_FORMATS},
}
