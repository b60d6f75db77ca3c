"""Matrix products x @ w.T with packed weights, fused with a norm, bias, gate and residual.

A program multiplies 16 rows of x with a fixed number of rows of w, in steps of a fixed number of
inputs. Passes of one and of sixteen rows run the same instructions in the same order; more rows are
more programs. The tile and the number of splits depend on the weight alone. Where a matrix has too
few rows to occupy a GPU, its inputs are split, and a second kernel adds the parts in order.

A one-row product is bound by memory reads, so it needs enough bytes in flight: at 4.3 TB/s and 0.7
us of latency, 3 MB, or 23 KB on each of 132 multiprocessors. A tile of 32 rows times 128 columns of
bfloat16 is 8 KiB, and a program has three of them in flight. So one program per multiprocessor is
enough, and only matrices with fewer rows are split.
"""

# Kernels are typed by Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anydecode.kernels.cuda.available import COMPILED, is_interpreted, part_of_kernel
from anydecode.kernels.cuda.packing import CHUNK, Packed

#: Rows of x in a program: the minimum of a tensor core, so that 1 and 16 rows use the same kernel.
ROWS = tl.constexpr(16)

_INTERPRETED = tl.constexpr(is_interpreted())
_HALF = tl.constexpr(CHUNK // 2)


@part_of_kernel
def dot(x, w, acc, PRECISION: tl.constexpr):
    """acc + x @ w for float32 x. "bf16" and "tf32" use tensor cores, "ieee" does not."""
    if _INTERPRETED:
        # The interpreter multiplies the integers in which it stores bfloat16, and its matrix
        # product is a library's, whose bits depend on the row index.
        if PRECISION == "bf16":
            x = x.to(tl.bfloat16)
            w = w.to(tl.bfloat16)
        parts = x.to(tl.float32)[:, :, None] * w.to(tl.float32)[None, :, :]
        acc += tl.sum(parts, 1)
    elif PRECISION == "bf16":
        acc = tl.dot(x.to(tl.bfloat16), w.to(tl.bfloat16), acc)
    elif PRECISION == "tf32":
        acc = tl.dot(x, w.to(tl.float32), acc, input_precision="tf32")
    else:
        acc = tl.dot(x, w.to(tl.float32), acc, input_precision="ieee")
    return acc


@part_of_kernel
def activate(x, ACTIVATION: tl.constexpr):
    """silu, gelu or gelu_tanh of float32 x."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    inner = (x * x * x * 0.044715 + x) * 1.5957691216057308  # 2 sqrt(2 / pi)
    return x / (1.0 + tl.exp(-inner))


@part_of_kernel
def _inputs(
    x_ptr, stride, row, rows, k, width, norm_ptr, squares,
    NORM: tl.constexpr,
):  # fmt: skip
    """Columns k of 16 rows of x in float32 times the norm's weight; the sum of squares so far."""
    mask = (row < rows)[:, None] & (k < width)[None, :]
    at = row.to(tl.int64)[:, None] * stride + k[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        squares += tl.sum(x * x, 1)
        x = x * tl.load(norm_ptr + k, mask=k < width, other=0.0)[None, :]
    return x, squares


@part_of_kernel
def _scaled(
    codes, scale_ptr, offset_ptr, groups, ZERO: tl.constexpr,
    OFFSET: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Codes `[COLUMNS, WIDTH]` as float32 numbers; `groups` are the offsets of their scales."""
    values = (codes.to(tl.int32) - ZERO).to(tl.float32)
    values = tl.reshape(values, (COLUMNS, WIDTH // GROUP, GROUP))
    scale = tl.load(scale_ptr + groups).to(tl.float32)
    values = values * scale[:, :, None]
    if OFFSET:
        values = values + tl.load(offset_ptr + groups).to(tl.float32)[:, :, None]
    return tl.reshape(values, (COLUMNS, WIDTH))


# `rows` is not specialised: one row and sixteen run the same machine code.
@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x_ptr, x_stride, rows, norm_ptr, eps,
    codes_ptr, scale_ptr, offset_ptr, unit, bias_ptr,
    residual_ptr, out_ptr, out_features, width, padded,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    PRECISION: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """One tile of the result. With SPLITS > 1, one part of it, which `_reduce_kernel` adds.

    With GATED, w is two concatenated matrices of `out_features` rows, and the result is
    activation(first) * second.
    """
    # Tiles of rows are the first axis, so that programs with the same weights run concurrently.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    first = tl.minimum(column, out_features - 1).to(tl.int64)
    second = first + out_features
    acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    acc_up = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    squares = tl.full((ROWS,), 0.0, tl.float32)
    steps = (padded + STEP - 1) // STEP
    share = (steps + SPLITS - 1) // SPLITS
    for number in range(split * share, tl.minimum(steps, (split + 1) * share)):
        start = number * STEP
        if BITS == 4:
            byte = tl.arange(0, STEP // 2)
            low = start + byte // _HALF * (2 * _HALF) + byte % _HALF
            group = tl.arange(0, STEP // 2 // GROUP)
            per_half: tl.constexpr = _HALF // GROUP
            groups = start // GROUP + group // per_half * (2 * per_half) + group % per_half
            x_low, squares = _inputs(
                x_ptr, x_stride, row, rows, low, width, norm_ptr, squares, NORM
            )
            x_high, squares = _inputs(
                x_ptr, x_stride, row, rows, low + _HALF, width, norm_ptr, squares, NORM
            )
            at = start // 2 + byte
            codes = tl.load(codes_ptr + first[:, None] * (padded // 2) + at[None, :])
            offset = first[:, None] * (padded // GROUP) + groups[None, :]
            w = _scaled(
                codes & 15, scale_ptr, offset_ptr, offset, ZERO, OFFSET, COLUMNS, STEP // 2, GROUP
            )
            acc = dot(x_low, tl.trans(w), acc, PRECISION)
            w = _scaled(
                codes >> 4, scale_ptr, offset_ptr, offset + per_half, ZERO, OFFSET, COLUMNS,
                STEP // 2, GROUP,
            )  # fmt: skip
            acc = dot(x_high, tl.trans(w), acc, PRECISION)
            if GATED:
                codes = tl.load(codes_ptr + second[:, None] * (padded // 2) + at[None, :])
                offset = second[:, None] * (padded // GROUP) + groups[None, :]
                w = _scaled(
                    codes & 15, scale_ptr, offset_ptr, offset, ZERO, OFFSET, COLUMNS, STEP // 2,
                    GROUP,
                )  # fmt: skip
                acc_up = dot(x_low, tl.trans(w), acc_up, PRECISION)
                w = _scaled(
                    codes >> 4, scale_ptr, offset_ptr, offset + per_half, ZERO, OFFSET, COLUMNS,
                    STEP // 2, GROUP,
                )  # fmt: skip
                acc_up = dot(x_high, tl.trans(w), acc_up, PRECISION)
        else:
            k = start + tl.arange(0, STEP)
            x, squares = _inputs(x_ptr, x_stride, row, rows, k, width, norm_ptr, squares, NORM)
            if BITS == 8:
                groups = start // GROUP + tl.arange(0, STEP // GROUP)
                codes = tl.load(codes_ptr + first[:, None] * padded + k[None, :])
                offset = first[:, None] * (padded // GROUP) + groups[None, :]
                w = _scaled(
                    codes, scale_ptr, offset_ptr, offset, ZERO, OFFSET, COLUMNS, STEP, GROUP
                )
                acc = dot(x, tl.trans(w), acc, PRECISION)
                if GATED:
                    codes = tl.load(codes_ptr + second[:, None] * padded + k[None, :])
                    offset = second[:, None] * (padded // GROUP) + groups[None, :]
                    w = _scaled(
                        codes, scale_ptr, offset_ptr, offset, ZERO, OFFSET, COLUMNS, STEP, GROUP
                    )
                    acc_up = dot(x, tl.trans(w), acc_up, PRECISION)
            else:
                inside = (k < width)[None, :]
                w = tl.load(codes_ptr + first[:, None] * width + k[None, :], mask=inside, other=0.0)
                acc = dot(x, tl.trans(w), acc, PRECISION)
                if GATED:
                    at_up = second[:, None] * width + k[None, :]
                    w = tl.load(codes_ptr + at_up, mask=inside, other=0.0)
                    acc_up = dot(x, tl.trans(w), acc_up, PRECISION)
    mask = (row < rows)[:, None] & (column < out_features)[None, :]
    offset = row.to(tl.int64)[:, None] * out_features + column[None, :]
    if SPLITS > 1:
        planes: tl.constexpr = 2 if GATED else 1
        size = rows.to(tl.int64) * out_features
        tl.store(out_ptr + split * planes * size + offset, acc, mask=mask)
        if GATED:
            tl.store(out_ptr + (split * planes + 1) * size + offset, acc_up, mask=mask)
    else:
        acc = acc * unit
        if NORM:
            factor = 1.0 / tl.sqrt(squares / width + eps)
            acc = acc * factor[:, None]
            acc_up = acc_up * factor[:, None]
        if BIAS:
            acc = acc + tl.load(bias_ptr + column, mask=column < out_features, other=0.0)[None, :]
        if GATED:
            acc = activate(acc, ACTIVATION) * (acc_up * unit)
        if RESIDUAL:
            acc = tl.load(residual_ptr + offset, mask=mask, other=0.0) + acc
        tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _reduce_kernel(
    parts_ptr, unit, bias_ptr, residual_ptr, out_ptr, rows, out_features,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts of a split product in order, then apply bias, gate and residual."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < out_features
    offset = tl.program_id(0).to(tl.int64) * out_features + column
    size = rows.to(tl.int64) * out_features
    planes: tl.constexpr = 2 if GATED else 1
    acc = tl.full((BLOCK,), 0.0, tl.float32)
    acc_up = tl.full((BLOCK,), 0.0, tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(parts_ptr + split * planes * size + offset, mask=mask, other=0.0)
        if GATED:
            acc_up += tl.load(
                parts_ptr + (split * planes + 1) * size + offset, mask=mask, other=0.0
            )
    acc = acc * unit
    if BIAS:
        acc = acc + tl.load(bias_ptr + column, mask=mask, other=0.0)
    if GATED:
        acc = activate(acc, ACTIVATION) * (acc_up * unit)
    if RESIDUAL:
        acc = tl.load(residual_ptr + offset, mask=mask, other=0.0) + acc
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=mask)


def precision(packed: Packed) -> str:
    """The arithmetic of products with a weight: the fastest that does not round plain weights.

    tf32 represents every float16. Dequantised codes are rounded to bfloat16, as activations are.
    """
    if packed.takes_bfloat16:
        return "bf16"
    return "tf32" if packed.codes.dtype == torch.float16 else "ieee"


def product(
    x: torch.Tensor,
    packed: Packed,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """x @ w.T, optionally with a norm before it and bias, gate and residual after it.

    Args:
        x: `[rows, in_features]`, float32 or bfloat16.
        packed: The weight w.
        norm: Weight of an RMS norm of x over its whole width, applied first.
        eps: Of that norm.
        bias: float32 `[out_features]`, added to the product.
        residual: float32 `[rows, out_features]`, added to the result.
        activation: Where given, w is two matrices, gate and then up, and the result is
            activation(gate) * up.
        dtype: Of the result.

    Returns:
        `[rows, out_features]` in `dtype`.

    Raises:
        ValueError: A norm is given with a weight that is split.
    """
    gated = bool(activation)
    tile = packed.tile
    if norm is not None and tile.splits > 1:
        raise ValueError("a split product cannot include a norm; apply `rms_norm` to x first")
    rows, out_features = len(x), packed.out_features // (2 if gated else 1)
    out = torch.empty(rows, out_features, dtype=dtype, device=x.device)
    if not rows:
        return out
    if packed.order is not None:
        x = x.index_select(1, packed.order)
        norm = None if norm is None else norm.index_select(0, packed.order)
    target = out
    if tile.splits > 1:
        size = tile.splits * (2 if gated else 1)
        target = torch.empty(size, rows, out_features, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, ROWS.value), triton.cdiv(out_features, tile.columns), tile.splits)
    _product_kernel[grid](
        x, x.stride(0), rows, _or(norm, x), eps,
        packed.codes, _or(packed.scale, x), _or(packed.offset, x), packed.unit, _or(bias, x),
        _or(residual, x), target, out_features, packed.in_features, packed.padded,
        BITS=packed.bits, GROUP=packed.group, ZERO=packed.zero, OFFSET=packed.offset is not None,
        PRECISION=precision(packed), NORM=norm is not None, BIAS=bias is not None,
        RESIDUAL=residual is not None, GATED=gated, ACTIVATION=activation, SPLITS=tile.splits,
        COLUMNS=tile.columns, STEP=tile.step, num_warps=4, num_stages=_stages(packed, gated),
        **COMPILED,
    )  # fmt: skip
    if tile.splits > 1:
        _reduce_kernel[(rows, triton.cdiv(out_features, 512))](
            target, packed.unit, _or(bias, x), _or(residual, x), out, rows, out_features,
            BIAS=bias is not None, RESIDUAL=residual is not None, GATED=gated,
            ACTIVATION=activation, SPLITS=tile.splits, BLOCK=512, **COMPILED,
        )  # fmt: skip
    return out


def _stages(packed: Packed, gated: bool) -> int:
    """Depth of the software pipeline: about 40 KB of weights in flight per multiprocessor, in one
    program with many stages or several with few."""
    if packed.bits == 32:
        return 2
    return 3 if gated else 6 if packed.tile.columns == 32 else 4


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """`tensor`, or another pointer for an argument that is not read."""
    return other if tensor is None else tensor
