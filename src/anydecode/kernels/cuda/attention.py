"""Rotary embedding with the cache write, and attention over slots with any mask.

Flash-decoding (Dao et al., 2023) in a fixed order. Keys are processed in blocks of `KEY_BLOCK`
positions counted from position 0, wherever their slots are. Block b belongs to split b % splits,
whatever the length of the row. A split processes its blocks in order, and the splits are added in
order. A fully masked block changes no bit.
"""

# Kernels are typed by Triton.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anydecode.kernels.cuda.available import COMPILED, part_of_kernel
from anydecode.kernels.cuda.pointwise import _tanh
from anydecode.kernels.cuda.products import ROWS, dot
from anydecode.kernels.cuda.rows import DeviceRows
from anydecode.kernels.interface import KEY_BLOCK, Attention

_BLOCK = tl.constexpr(KEY_BLOCK)

#: Splits of a row's keys: with 8 key heads, one row occupies 128 multiprocessors.
SPLITS = 16

_PRECISION = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "bf16"}


@part_of_kernel
def _rotate_row(
    x_ptr, row, x_stride, heads, head_dim, norm_ptr, eps, cos_ptr, sin_ptr, half, position,
    out_ptr, target,
    NORM: tl.constexpr, ROPE: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate all heads of one row; write them to row `target` unless it is negative.

    A head's dimensions are processed in three parts: the two that are rotated with each other, and
    the rest.
    """
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (pair < half)
    base = x_ptr + row * x_stride + head * head_dim
    first = tl.load(base + pair, mask=mask, other=0.0)
    second = tl.load(base + half + pair, mask=mask, other=0.0)
    tail = 2 * half + tl.arange(0, REST)[None, :]
    rest_mask = (head < heads) & (tail < head_dim)
    rest = tl.load(base + tail, mask=rest_mask, other=0.0)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        factor = (1.0 / tl.sqrt(squares / head_dim + eps))[:, None]
        first = first * factor * tl.load(norm_ptr + pair, mask=pair < half, other=0.0)
        second = second * factor * tl.load(norm_ptr + half + pair, mask=pair < half, other=0.0)
        rest = rest * factor * tl.load(norm_ptr + tail, mask=tail < head_dim, other=0.0)
    if ROPE:
        angle = position * half + pair
        cos = tl.load(cos_ptr + angle, mask=pair < half, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=pair < half, other=0.0)
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    # A block, because the interpreter accepts no scalar as a mask.
    is_stored = target + 0 * head >= 0
    out = out_ptr + target * heads * head_dim + head * head_dim
    dtype = out_ptr.dtype.element_ty
    tl.store(out + pair, first.to(dtype), mask=mask & is_stored)
    tl.store(out + half + pair, second.to(dtype), mask=mask & is_stored)
    tl.store(out + tail, rest.to(dtype), mask=rest_mask & is_stored)


@triton.jit
def _rotate_kernel(
    x_ptr, x_stride, heads, head_dim, cos_ptr, sin_ptr, half, positions_ptr, out_ptr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int64)
    _rotate_row(
        x_ptr, row, x_stride, heads, head_dim, x_ptr, 0.0, cos_ptr, sin_ptr, half, position,
        out_ptr, row, False, True, HEADS, HALF, REST,
    )  # fmt: skip


@triton.jit
def _store_kernel(
    q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride, heads, kv_heads, head_dim,
    q_norm_ptr, k_norm_ptr, q_eps, k_eps, cos_ptr, sin_ptr, half, positions_ptr, slots_ptr,
    out_ptr, keys_ptr, values_ptr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROPE: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Write the queries of one row to `out_ptr`, or its keys or values to the row's slot."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions_ptr + row).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if part == 0:
        _rotate_row(
            q_ptr, row, q_stride, heads, head_dim, q_norm_ptr, q_eps, cos_ptr, sin_ptr, half,
            position, out_ptr, row, Q_NORM, ROPE, HEADS, HALF, REST,
        )  # fmt: skip
    elif part == 1:
        _rotate_row(
            k_ptr, row, k_stride, kv_heads, head_dim, k_norm_ptr, k_eps, cos_ptr, sin_ptr, half,
            position, keys_ptr, slot, K_NORM, ROPE, KV_HEADS, HALF, REST,
        )  # fmt: skip
    else:
        _rotate_row(
            v_ptr, row, v_stride, kv_heads, head_dim, v_ptr, 0.0, cos_ptr, sin_ptr, half,
            position, values_ptr, slot, False, False, KV_HEADS, HALF, REST,
        )  # fmt: skip


Tables = tuple[torch.Tensor, torch.Tensor]


def _parts(head_dim: int, rope: Tables | None) -> tuple[int, int, int]:
    """Half the number of rotated dimensions, and the block sizes of that half and of the rest."""
    half = rope[0].shape[1] if rope is not None else head_dim // 2
    rest = head_dim - 2 * half
    return half, triton.next_power_of_2(max(1, half)), triton.next_power_of_2(max(1, rest))


def rotate(x: torch.Tensor, num_heads: int, rows: DeviceRows, rope: Tables) -> torch.Tensor:
    """Apply the rotary embedding to x float32 `[n, num_heads * head_dim]`.

    `rope` is the cosines and sines `[positions, half]`.
    """
    out = torch.empty(len(x), x.shape[1], dtype=torch.float32, device=x.device)
    head_dim = x.shape[1] // num_heads
    half, pairs, rest = _parts(head_dim, rope)
    if len(x):
        _rotate_kernel[(len(x),)](
            x, x.stride(0), num_heads, head_dim, *rope, half, rows.positions, out,
            HEADS=triton.next_power_of_2(num_heads), HALF=pairs, REST=rest, **COMPILED,
        )  # fmt: skip
    return out


def store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: DeviceRows,
    shape: Attention,
    *,
    rope: Tables | None = None,
    q_norm: tuple[torch.Tensor, float] | None = None,
    k_norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Normalise and rotate queries and keys per head, and store keys and values in the cache.

    Args:
        q, k, v: float32 `[n, heads * head_dim]`; their rows may be strided.
        keys, values: The cache `[slots, kv_heads, head_dim]`, written at the rows' slots (-1: not
            written).
        rope: Cosines and sines `[positions, half]`; None: no rotation.
        q_norm, k_norm: Weight and eps of the norm of each head; None: no norm.

    Returns:
        The queries, float32 `[n, heads * head_dim]`.
    """
    head_dim = shape.head_dim
    out = torch.empty(len(q), q.shape[1], dtype=torch.float32, device=q.device)
    half, pairs, rest = _parts(head_dim, rope)
    if len(q):
        _store_kernel[(len(q), 3)](
            q, q.stride(0), k, k.stride(0), v, v.stride(0), shape.num_heads, shape.num_kv_heads,
            head_dim, q if q_norm is None else q_norm[0], k if k_norm is None else k_norm[0],
            0.0 if q_norm is None else q_norm[1], 0.0 if k_norm is None else k_norm[1],
            q if rope is None else rope[0], q if rope is None else rope[1], half,
            rows.positions, rows.slots, out, keys, values,
            Q_NORM=q_norm is not None, K_NORM=k_norm is not None, ROPE=rope is not None,
            HEADS=triton.next_power_of_2(shape.num_heads),
            KV_HEADS=triton.next_power_of_2(shape.num_kv_heads), HALF=pairs, REST=rest, **COMPILED,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["layer"])
def _attend_kernel(
    q_ptr, keys_ptr, values_ptr, positions_ptr, prefix_ptr, tail_length_ptr, tail_start_ptr,
    table_start_ptr, table_stride_ptr, visible_ptr, acc_ptr, max_ptr, sum_ptr,
    layer, kv_heads, head_dim, scale, window, cap,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One split of the keys, for one row and one key head with all its query heads."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    prefix = tl.load(prefix_ptr + row)
    total = prefix + tl.load(tail_length_ptr + row)
    tail = tl.load(tail_start_ptr + row) - prefix
    table = tl.load(table_start_ptr + row) + layer * tl.load(table_stride_ptr + row)
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    is_dim = dim < head_dim
    is_head = head < GROUP
    head_index = (row * kv_heads + kv_head) * GROUP + head
    q_offset = head_index[:, None] * head_dim + dim[None, :]
    q = tl.load(q_ptr + q_offset, mask=is_head[:, None] & is_dim[None, :], other=0.0)
    min_position = 0
    first = split
    if WINDOW:
        min_position = tl.maximum(tl.load(positions_ptr + row) - window + 1, 0)
        skipped = tl.maximum(min_position // _BLOCK - split + SPLITS - 1, 0) // SPLITS
        first = split + skipped * SPLITS
    maximum = tl.full((HEADS,), float("-inf"), tl.float32)
    weight_sum = tl.full((HEADS,), 0.0, tl.float32)
    acc = tl.full((HEADS, DIM), 0.0, tl.float32)
    for block in range(first, (total + _BLOCK - 1) // _BLOCK, SPLITS):
        position = block * _BLOCK + tl.arange(0, _BLOCK)
        table_offset = tl.where(position < prefix, table, tail) + position
        mask = position < total
        slot = tl.load(visible_ptr + table_offset, mask=mask, other=-1).to(tl.int64)
        mask = mask & (slot >= 0)
        if WINDOW:
            mask = mask & (position >= min_position)
        kv_offset = (slot * kv_heads + kv_head)[:, None] * head_dim + dim[None, :]
        kv_mask = mask[:, None] & is_dim[None, :]
        key = tl.load(keys_ptr + kv_offset, mask=kv_mask, other=0.0)
        zeros = tl.full((HEADS, _BLOCK), 0.0, tl.float32)
        score = dot(q, tl.trans(key), zeros, PRECISION) * scale
        if CAP:
            score = _tanh(score / cap) * cap
        score = tl.where(mask[None, :], score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        finite_max = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp(score - finite_max[:, None])
        rescale = tl.exp(maximum - finite_max)
        value = tl.load(values_ptr + kv_offset, mask=kv_mask, other=0.0)
        weight_sum = weight_sum * rescale + tl.sum(weight, 1)
        acc = dot(weight, value, acc * rescale[:, None], PRECISION)
        maximum = new_maximum
    out = head_index * SPLITS + split
    tl.store(max_ptr + out, maximum, mask=is_head)
    tl.store(sum_ptr + out, weight_sum, mask=is_head)
    tl.store(
        acc_ptr + out[:, None] * head_dim + dim[None, :],
        acc,
        mask=is_head[:, None] & is_dim[None, :],
    )


@triton.jit
def _merge_kernel(
    acc_ptr, max_ptr, sum_ptr, out_ptr, head_dim, SPLITS: tl.constexpr, DIM: tl.constexpr
):
    """Add the splits of one head of one row, in order."""
    head_index = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, DIM)
    maximum = tl.full((), float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        maximum = tl.maximum(maximum, tl.load(max_ptr + head_index * SPLITS + split))
    finite_max = tl.where(maximum == float("-inf"), 0.0, maximum)
    weight_sum = tl.full((), 0.0, tl.float32)
    acc = tl.full((DIM,), 0.0, tl.float32)
    for split in tl.static_range(SPLITS):
        index = head_index * SPLITS + split
        factor = tl.exp(tl.load(max_ptr + index) - finite_max)
        weight_sum += tl.load(sum_ptr + index) * factor
        acc += tl.load(acc_ptr + index * head_dim + dim, mask=dim < head_dim, other=0.0) * factor
    acc = acc / tl.where(weight_sum == 0.0, 1.0, weight_sum)
    out = out_ptr + head_index * head_dim + dim
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=dim < head_dim)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: DeviceRows,
    layer: int,
    shape: Attention,
    *,
    splits: int = SPLITS,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention over the slots that `rows` list for `layer`.

    Args:
        q: Queries float32 `[n, heads * head_dim]`.
        keys, values: The cache `[slots, kv_heads, head_dim]` in float32, float16 or bfloat16; its
            products are computed in float32, tf32 or bfloat16.
        rows: The rows of the pass.
        layer: Index of the layer.
        shape: The layer's attention.
        splits: Number of splits of the keys; the bits of the result depend on it.
        dtype: Of the result.

    Returns:
        `[n, heads * head_dim]` in `dtype`.
    """
    count, heads, head_dim = len(q), shape.num_heads, shape.head_dim
    out = torch.empty(count, q.shape[1], dtype=dtype, device=q.device)
    if not count:
        return out
    acc = torch.empty(count, heads, splits, head_dim, dtype=torch.float32, device=q.device)
    maximum = torch.empty(count, heads, splits, dtype=torch.float32, device=q.device)
    weight_sum = torch.empty_like(maximum)
    group = heads // shape.num_kv_heads
    dim = triton.next_power_of_2(max(16, head_dim))
    _attend_kernel[(count, shape.num_kv_heads, splits)](
        q, keys, values, rows.positions, rows.prefix, rows.tail_length, rows.tail_start,
        rows.table_start, rows.table_stride, rows.visible, acc, maximum, weight_sum,
        layer, shape.num_kv_heads, head_dim, shape.scale, shape.window or 0, shape.softcap or 0.0,
        GROUP=group, WINDOW=shape.window is not None, CAP=shape.softcap is not None,
        PRECISION=_PRECISION[keys.dtype], SPLITS=splits,
        HEADS=max(ROWS.value, triton.next_power_of_2(group)), DIM=dim, num_warps=4, num_stages=2,
        **COMPILED,
        )  # fmt: skip
    _merge_kernel[(count * heads,)](
        acc,
        maximum,
        weight_sum,
        out,
        head_dim,
        SPLITS=splits,
        DIM=dim,
        num_warps=4,
        **COMPILED,
    )
    return out
