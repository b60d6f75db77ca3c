"""Row-wise operations: norms, gates, sums of rows, embeddings."""

# Kernels are typed by Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anydecode.kernels.cuda.available import COMPILED, part_of_kernel
from anydecode.kernels.cuda.packing import CHUNK, Packed
from anydecode.kernels.cuda.products import activate

_HALF = tl.constexpr(CHUNK // 2)
_BLOCK = 1024


@triton.jit
def _norm_kernel(
    x_ptr, weight_ptr, out_ptr, width, eps, groups,
    WEIGHT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMS norm of one group of one row."""
    group = tl.program_id(1)
    start = (tl.program_id(0).to(tl.int64) * groups + group) * width
    squares = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + start + at, mask=at < width, other=0.0)
        squares += x * x
    factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + start + at, mask=at < width, other=0.0) * factor
        if WEIGHT:
            weight_at = at + group * width if WIDE else at
            x = x * tl.load(weight_ptr + weight_at, mask=at < width, other=0.0)
        tl.store(out_ptr + start + at, x, mask=at < width)


@part_of_kernel
def _tanh(x):
    """tanh from exp of a number that is at most 0, which cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit(do_not_specialize=["count"])
def _pointwise_kernel(
    x_ptr, y_ptr, out_ptr, count, number,
    OPERATION: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gated, add, scale or softcap of flat float arrays, computed in float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    if OPERATION == "scale":
        x = x * number
    elif OPERATION == "softcap":
        x = _tanh(x / number) * number
    else:
        y = tl.load(y_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        if OPERATION == "add":
            x = x + y
        else:
            x = activate(x, ACTIVATION) * y
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _embed_kernel(
    tokens_ptr, codes_ptr, scale_ptr, offset_ptr, out_ptr, unit, factor, width, padded,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Dequantise one block of the row of one token to float32."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.maximum(tl.load(tokens_ptr + row), 0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < width
    if BITS > 8:
        x = tl.load(codes_ptr + token * width + k, mask=inside, other=0.0).to(tl.float32)
    else:
        if BITS == 4:
            byte_index = k // (2 * _HALF) * _HALF + k % _HALF
            byte = tl.load(codes_ptr + token * (padded // 2) + byte_index, mask=inside, other=0)
            code = tl.where(k % (2 * _HALF) < _HALF, byte & 15, byte >> 4)
        else:
            code = tl.load(codes_ptr + token * padded + k, mask=inside, other=0)
        group = token * (padded // GROUP) + k // GROUP
        x = (code.to(tl.int32) - ZERO).to(tl.float32)
        x = x * (tl.load(scale_ptr + group, mask=inside, other=0.0).to(tl.float32) * unit)
        if OFFSET:
            x = x + tl.load(offset_ptr + group, mask=inside, other=0.0).to(tl.float32) * unit
    tl.store(out_ptr + row * width + k, x * factor, mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, groups: int = 1
) -> torch.Tensor:
    """RMS norm of each of `groups` equal parts of float32 rows `[n, width]`."""
    out = torch.empty_like(x)
    width = x.shape[1] // groups
    if len(x):
        _norm_kernel[(len(x), groups)](
            x, x if weight is None else weight, out, width, eps, groups,
            WEIGHT=weight is not None, WIDE=weight is not None and weight.numel() != width,
            BLOCK=min(_BLOCK, triton.next_power_of_2(width)), **COMPILED,
        )  # fmt: skip
    return out


def _pointwise(
    operation: str,
    x: torch.Tensor,
    y: torch.Tensor | None = None,
    number: float = 0.0,
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        _pointwise_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
            x, x if y is None else y, out, x.numel(), number,
            OPERATION=operation, ACTIVATION=activation, BLOCK=_BLOCK, **COMPILED,
        )  # fmt: skip
    return out


def gated(
    gate: torch.Tensor, up: torch.Tensor, activation: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """activation(gate) * up"""
    return _pointwise("gated", gate, up, activation=activation, dtype=dtype)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y"""
    return _pointwise("add", x, y)


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor"""
    return _pointwise("scale", x, number=factor)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap)"""
    return _pointwise("softcap", x, number=cap)


def embed(tokens: torch.Tensor, packed: Packed, factor: float = 1.0) -> torch.Tensor:
    """Rows float32 `[n, in_features]` of int32 `tokens` (below 0: row 0), times `factor`."""
    out = torch.empty(len(tokens), packed.in_features, dtype=torch.float32, device=tokens.device)
    if len(tokens):
        codes = packed.codes
        _embed_kernel[(len(tokens), triton.cdiv(packed.in_features, _BLOCK))](
            tokens, codes, codes if packed.scale is None else packed.scale,
            codes if packed.offset is None else packed.offset, out, packed.unit, factor,
            packed.in_features, packed.padded, BITS=packed.bits, GROUP=packed.group,
            ZERO=packed.zero, OFFSET=packed.offset is not None, BLOCK=_BLOCK, **COMPILED,
        )  # fmt: skip
    return out
