"""Weight formats: sizes, dequantisation and quantisation, vectorised in torch.

The byte layouts are those of GGUF: a row consists of blocks, each with its codes and scales. The
arithmetic follows the order of operations of the `gguf` package, so that float32 results are
bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

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
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}

DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

#: Formats that `quantize` writes.
QUANTIZABLE = ("Q8_0", "Q4_0", "Q4_1")

# Rows are converted in groups of about this many values, to limit the size of temporaries.
_GROUP = 1 << 21


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
    dtype = torch.uint8 if packed else DTYPES[weight.format]
    data = weight.data
    is_valid = data.dtype == dtype and tuple(data.shape) == (weight.out_features, columns)
    if not is_valid or weight.in_features % values or not data.numel():
        raise CheckpointError(
            f"{weight.name or 'a weight'} holds {data.dtype} of shape {tuple(data.shape)}, not a"
            f" {weight.format} matrix of {weight.out_features} by {weight.in_features}"
        )


def plain_weight(tensor: torch.Tensor, name: str = "") -> Weight:
    """A `Weight` over a float matrix `[out_features, in_features]`, without a copy.

    Raises:
        ValueError: The tensor is no matrix in float32, float16 or bfloat16.
    """
    format = next((f for f, dtype in DTYPES.items() if dtype == tensor.dtype), None)
    if format is None or tensor.dim() != 2:
        raise ValueError(f"no weight format for {tensor.dtype} of shape {tuple(tensor.shape)}")
    return Weight(format, tensor.shape[0], tensor.shape[1], tensor, name)


def dequantize(weight: Weight) -> torch.Tensor:
    """The matrix as float32 `[out_features, in_features]`."""
    return _to_float(weight.format, weight.data, weight.in_features)


def dequantize_rows(weight: Weight, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
    """Some rows as float32 `[len(rows), in_features]`; no other row is converted."""
    index = torch.as_tensor(np.asarray(rows, dtype=np.int64), device=weight.data.device)
    return _to_float(weight.format, weight.data.index_select(0, index), weight.in_features)


def quantize(tensor: torch.Tensor, format: str, name: str = "") -> Weight:
    """Quantise a float matrix by rounding to nearest, as GGUF's reference does.

    Args:
        tensor: `[out_features, in_features]`.
        format: "Q8_0", "Q4_0" or "Q4_1".
        name: Name of the weight.

    Returns:
        The weight; in bfloat16 where `in_features` is not a multiple of 32.

    Raises:
        ValueError: The format is another one.
    """
    if format not in QUANTIZABLE:
        raise ValueError(f"cannot quantise to {format}; allowed are {', '.join(QUANTIZABLE)}")
    rows, columns = tensor.shape
    values, size = BLOCKS[format]
    if columns % values:
        return Weight("BF16", rows, columns, tensor.to(torch.bfloat16), name)
    data = torch.empty(rows, columns // values * size, dtype=torch.uint8, device=tensor.device)
    step = max(1, _GROUP // columns)
    for start in range(0, rows, step):
        group = tensor[start : start + step].to(torch.float32).reshape(-1, values)
        data[start : start + step] = _QUANTIZERS[format](group).view(-1, data.shape[1])
    return Weight(format, rows, columns, data, name)


def _to_float(format: str, data: torch.Tensor, in_features: int) -> torch.Tensor:
    if not is_packed(format):
        return data.to(torch.float32)
    rows, (_, size) = data.shape[0], BLOCKS[format]
    out = torch.empty(rows, in_features, dtype=torch.float32, device=data.device)
    step = max(1, _GROUP // max(1, in_features))
    for start in range(0, rows, step):
        blocks = data[start : start + step].reshape(-1, size)
        out[start : start + step] = _DEQUANTIZERS[format](blocks).view(-1, in_features)
    return out


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


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).to(torch.float32)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 2:]).flatten(1).to(torch.float32) - 8
    return _half(blocks, 0) * codes


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 4:]).flatten(1).to(torch.float32)
    return _half(blocks, 0) * codes + _half(blocks, 2)


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Five-bit codes: 4 bytes `high` with the top bit of each value, 16 bytes `low` of nibbles."""
    top = _bits(high, 1).transpose(-1, -2).flatten(1)
    return (_nibbles(low).flatten(1) | (top << 4)).to(torch.float32)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + _half(blocks, 2)


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


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, offset = _k_scales(blocks)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1, 2)
    return scale * codes.to(torch.float32) - offset


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, offset = _k_scales(blocks)
    top = _bits(blocks[:, 16:48], 1)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1, 2)
    return scale * (low | (top << 4)).to(torch.float32) - offset


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    top = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    codes = ((low | (top << 4)).to(torch.float32) - 32).view(-1, 16, 16)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).to(torch.float32)
    return scale.unsqueeze(-1) * codes


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)


def _pack(codes: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    """Blocks of float16 `scales` and then `codes` uint8."""
    heads = [scale.to(torch.float16).view(torch.uint8) for scale in scales]
    return torch.cat((*heads, codes), dim=1)


def _join_nibbles(codes: torch.Tensor) -> torch.Tensor:
    codes = codes.clamp(0, 15).to(torch.uint8)
    return codes[:, :16] | (codes[:, 16:] << 4)


def _make_q8_0(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().amax(1, keepdim=True) / 127
    scaled = values * _inverse(scale)
    # Halves are rounded away from zero, as in the reference; torch.round rounds them to even.
    magnitude = scaled.abs()
    rounded = magnitude.floor()
    rounded = rounded + (2 * (magnitude - rounded)).floor()
    codes = (rounded * scaled.sign()).to(torch.int8).view(torch.uint8)
    return _pack(codes, scale)


def _make_q4_0(values: torch.Tensor) -> torch.Tensor:
    extreme = values.gather(1, values.abs().argmax(1, keepdim=True))
    scale = extreme / -8
    return _pack(_join_nibbles((values * _inverse(scale) + 8.5).trunc()), scale)


def _make_q4_1(values: torch.Tensor) -> torch.Tensor:
    low = values.amin(1, keepdim=True)
    scale = (values.amax(1, keepdim=True) - low) / 15
    return _pack(_join_nibbles(((values - low) * _inverse(scale) + 0.5).trunc()), scale, low)


_Blockwise = Callable[[torch.Tensor], torch.Tensor]

_DEQUANTIZERS: dict[str, _Blockwise] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

_QUANTIZERS: dict[str, _Blockwise] = {
    "Q8_0": _make_q8_0,
    "Q4_0": _make_q4_0,
    "Q4_1": _make_q4_1,
}
