"""Rotary embedding with the cache write, and attention over slots for any visibility.

Flash-decoding (Dao et al., 2023) with everything that could move a bit held fixed: a row's keys are
taken in blocks of `KEY_BLOCK` positions counted from position 0, wherever their slots are; block b
belongs to split b % splits, however long the row is; a split goes through its blocks in order, and
the splits are added in order. A block in which a row sees nothing changes no bit.
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

#: Splits of a row's keys: with 8 key heads, one row fills 128 multiprocessors.
SPLITS = 16

_PRECISION = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "bf16"}


@part_of_kernel
def _turn_row(
    x_ptr, row, x_stride, heads, head_dim, norm_ptr, eps, cos_ptr, sin_ptr, half, position,
    out_ptr, target,
    NORM: tl.constexpr, ROPE: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """All heads of one row: normalised, rotated, and written to row `target`; below 0: nowhere.

    The head's dimensions are taken in three parts: the two that are rotated with each other, and
    the rest.
    """
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    there = (head < heads) & (pair < half)
    base = x_ptr + row * x_stride + head * head_dim
    first = tl.load(base + pair, mask=there, other=0.0)
    second = tl.load(base + half + pair, mask=there, other=0.0)
    more = 2 * half + tl.arange(0, REST)[None, :]
    there_more = (head < heads) & (more < head_dim)
    rest = tl.load(base + more, mask=there_more, other=0.0)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        factor = (1.0 / tl.sqrt(squares / head_dim + eps))[:, None]
        first = first * factor * tl.load(norm_ptr + pair, mask=pair < half, other=0.0)
        second = second * factor * tl.load(norm_ptr + half + pair, mask=pair < half, other=0.0)
        rest = rest * factor * tl.load(norm_ptr + more, mask=more < head_dim, other=0.0)
    if ROPE:
        angle = position * half + pair
        cos = tl.load(cos_ptr + angle, mask=pair < half, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=pair < half, other=0.0)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    # As a block: the interpreter takes no scalar for a mask.
    kept = target + 0 * head >= 0
    out = out_ptr + target * heads * head_dim + head * head_dim
    kind = out_ptr.dtype.element_ty
    tl.store(out + pair, first.to(kind), mask=there & kept)
    tl.store(out + half + pair, second.to(kind), mask=there & kept)
    tl.store(out + more, rest.to(kind), mask=there_more & kept)


@triton.jit
def _turn_kernel(
    x_ptr, x_stride, heads, head_dim, cos_ptr, sin_ptr, half, positions_ptr, out_ptr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int64)
    _turn_row(
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
    """Queries of one row to their own array, keys or values to the row's slot."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions_ptr + row).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if part == 0:
        _turn_row(
            q_ptr, row, q_stride, heads, head_dim, q_norm_ptr, q_eps, cos_ptr, sin_ptr, half,
            position, out_ptr, row, Q_NORM, ROPE, HEADS, HALF, REST,
        )  # fmt: skip
    elif part == 1:
        _turn_row(
            k_ptr, row, k_stride, kv_heads, head_dim, k_norm_ptr, k_eps, cos_ptr, sin_ptr, half,
            position, keys_ptr, slot, K_NORM, ROPE, KV_HEADS, HALF, REST,
        )  # fmt: skip
    else:
        _turn_row(
            v_ptr, row, v_stride, kv_heads, head_dim, v_ptr, 0.0, cos_ptr, sin_ptr, half,
            position, values_ptr, slot, False, False, KV_HEADS, HALF, REST,
        )  # fmt: skip


Tables = tuple[torch.Tensor, torch.Tensor]


def _parts(head_dim: int, rope: Tables | None) -> tuple[int, int, int]:
    """Half the rotated dimensions, and the blocks that hold those and the others."""
    half = rope[0].shape[1] if rope is not None else head_dim // 2
    rest = head_dim - 2 * half
    return half, triton.next_power_of_2(max(1, half)), triton.next_power_of_2(max(1, rest))


def turn(x: torch.Tensor, num_heads: int, rows: DeviceRows, rope: Tables) -> torch.Tensor:
    """x float32 `[n, num_heads * head_dim]`, each head rotated by its row's position. `rope`:
    cosines and sines `[positions, half]`."""
    out = torch.empty(len(x), x.shape[1], dtype=torch.float32, device=x.device)
    head_dim = x.shape[1] // num_heads
    half, pairs, rest = _parts(head_dim, rope)
    if len(x):
        _turn_kernel[(len(x),)](
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
    """Queries float32 `[n, heads * head_dim]`, normalised head by head and rotated; keys likewise
    and values written to the rows' slots (-1: nowhere) of `keys` and `values` `[slots, kv_heads,
    head_dim]`. q, k and v are float32 with rows that may be strided; a norm is weight and eps."""
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
    table_start_ptr, table_stride_ptr, seen_ptr, part_ptr, most_ptr, sum_ptr,
    layer, kv_heads, head_dim, scale, window, cap,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One row, one key head with all its query heads, one split of the keys."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    prefix = tl.load(prefix_ptr + row)
    total = prefix + tl.load(tail_length_ptr + row)
    tail = tl.load(tail_start_ptr + row) - prefix
    table = tl.load(table_start_ptr + row) + layer * tl.load(table_stride_ptr + row)
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    wide = dim < head_dim
    real = head < GROUP
    place = (row * kv_heads + kv_head) * GROUP + head
    q_at = place[:, None] * head_dim + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=real[:, None] & wide[None, :], other=0.0)
    least = 0
    first = split
    if WINDOW:
        least = tl.maximum(tl.load(positions_ptr + row) - window + 1, 0)
        skipped = tl.maximum(least // _BLOCK - split + SPLITS - 1, 0) // SPLITS
        first = split + skipped * SPLITS
    most = tl.full((HEADS,), float("-inf"), tl.float32)
    summed = tl.full((HEADS,), 0.0, tl.float32)
    acc = tl.full((HEADS, DIM), 0.0, tl.float32)
    for block in range(first, (total + _BLOCK - 1) // _BLOCK, SPLITS):
        position = block * _BLOCK + tl.arange(0, _BLOCK)
        at = tl.where(position < prefix, table, tail) + position
        there = position < total
        slot = tl.load(seen_ptr + at, mask=there, other=-1).to(tl.int64)
        there = there & (slot >= 0)
        if WINDOW:
            there = there & (position >= least)
        cell = (slot * kv_heads + kv_head)[:, None] * head_dim + dim[None, :]
        inside = there[:, None] & wide[None, :]
        key = tl.load(keys_ptr + cell, mask=inside, other=0.0)
        blank = tl.full((HEADS, _BLOCK), 0.0, tl.float32)
        score = dot(q, tl.trans(key), blank, PRECISION) * scale
        if CAP:
            score = _tanh(score / cap) * cap
        score = tl.where(there[None, :], score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - safe[:, None])
        shrink = tl.exp(most - safe)
        value = tl.load(values_ptr + cell, mask=inside, other=0.0)
        summed = summed * shrink + tl.sum(weight, 1)
        acc = dot(weight, value, acc * shrink[:, None], PRECISION)
        most = higher
    out = place * SPLITS + split
    tl.store(most_ptr + out, most, mask=real)
    tl.store(sum_ptr + out, summed, mask=real)
    tl.store(
        part_ptr + out[:, None] * head_dim + dim[None, :], acc, mask=real[:, None] & wide[None, :]
    )


@triton.jit
def _join_kernel(
    part_ptr, most_ptr, sum_ptr, out_ptr, head_dim, SPLITS: tl.constexpr, DIM: tl.constexpr
):
    """One head of one row: its splits, added in order."""
    place = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, DIM)
    most = tl.full((), float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        most = tl.maximum(most, tl.load(most_ptr + place * SPLITS + split))
    safe = tl.where(most == float("-inf"), 0.0, most)
    summed = tl.full((), 0.0, tl.float32)
    acc = tl.full((DIM,), 0.0, tl.float32)
    for split in tl.static_range(SPLITS):
        at = place * SPLITS + split
        factor = tl.exp(tl.load(most_ptr + at) - safe)
        summed += tl.load(sum_ptr + at) * factor
        acc += tl.load(part_ptr + at * head_dim + dim, mask=dim < head_dim, other=0.0) * factor
    acc = acc / tl.where(summed == 0.0, 1.0, summed)
    out = out_ptr + place * head_dim + dim
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
    """Attention of q float32 `[n, heads * head_dim]` over what the rows see in `layer`.

    `keys`, `values`: `[slots, kv_heads, head_dim]` in float32, float16 or bfloat16; the products
    are taken in float32, tf32 or bfloat16.
    """
    count, heads, head_dim = len(q), shape.num_heads, shape.head_dim
    out = torch.empty(count, q.shape[1], dtype=dtype, device=q.device)
    if not count:
        return out
    part = torch.empty(count, heads, splits, head_dim, dtype=torch.float32, device=q.device)
    most = torch.empty(count, heads, splits, dtype=torch.float32, device=q.device)
    summed = torch.empty_like(most)
    group = heads // shape.num_kv_heads
    dim = triton.next_power_of_2(max(16, head_dim))
    _attend_kernel[(count, shape.num_kv_heads, splits)](
        q, keys, values, rows.positions, rows.prefix, rows.tail_length, rows.tail_start,
        rows.table_start, rows.table_stride, rows.seen, part, most, summed,
        layer, shape.num_kv_heads, head_dim, shape.scale, shape.window or 0, shape.softcap or 0.0,
        GROUP=group, WINDOW=shape.window is not None, CAP=shape.softcap is not None,
        PRECISION=_PRECISION[keys.dtype], SPLITS=splits,
        HEADS=max(ROWS.value, triton.next_power_of_2(group)), DIM=dim, num_warps=4, num_stages=2,
        **COMPILED,
        )  # fmt: skip
    _join_kernel[(count * heads,)](
        part,
        most,
        summed,
        out,
        head_dim,
        SPLITS=splits,
        DIM=dim,
        num_warps=4,
        **COMPILED,
    )
    return out
