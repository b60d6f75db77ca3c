"""The reference arithmetic, in torch, on any device: plain, and batch-invariant to the bit.

A row's result never depends on the other rows of the pass, on their number or on its place among
them. Matrix products go through tiles of constant shape; everything else is elementwise, with sums
in an order that is written down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from anydecode.kernels import elementary
from anydecode.kernels.cache import decode, encode
from anydecode.kernels.interface import (
    KEY_BLOCK,
    Adapter,
    Attention,
    Backend,
    KeyValues,
    Rope,
    Rows,
    Weight,
)
from anydecode.kernels.tiled import TiledProduct
from anydecode.kernels.visibility import lengths, visible

# Attention forms products of queries and keys in groups of about this many numbers.
_GROUP = 1 << 18


@dataclass(eq=False)
class _Bound:
    """The rows at work, and what they work on."""

    rows: Rows
    index: np.ndarray  # int64 [m], which rows of the pass
    cache: KeyValues
    adapters: Sequence[Adapter]
    positions: torch.Tensor  # int64 [m]
    highest: int


class ReferenceBackend(Backend):
    """Values are float32 tensors `[m, width]` on `device`. `bind` comes before the operations that
    look at rows (`rope`, `attention`, and `linear` where there are adapters)."""

    name = "reference"

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self._product = TiledProduct()
        self._rotary: dict[Rope, elementary.RotaryTable] = {}
        self._bound: _Bound | None = None

    def bind(
        self, rows: Rows, index: np.ndarray, cache: KeyValues, adapters: Sequence[Adapter] = ()
    ) -> None:
        """The values that follow have one row for each of `index`, rows of the pass `rows`."""
        index = index.astype(np.int64)
        positions = rows.positions[index].astype(np.int64)
        self._bound = _Bound(
            rows,
            index,
            cache,
            adapters,
            torch.from_numpy(positions).to(self.device),
            int(positions.max(initial=0)),
        )

    def unbind(self) -> None:
        """The values that follow belong to no pass: no adapters, no attention."""
        self._bound = None

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float, groups: int = 1
    ) -> torch.Tensor:
        parts = x.view(*x.shape[:-1], groups, x.shape[-1] // groups)
        mean = elementary.tree_sum(parts * parts).unsqueeze(-1) / parts.shape[-1]
        parts = parts / torch.sqrt(mean + eps)
        if weight is not None:
            parts = parts * (weight.view(groups, -1) if weight.numel() == x.shape[-1] else weight)
        return parts.flatten(-2)

    def linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._linear(x, weight, bias, self._adapters())

    def _linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        adapters: np.ndarray | None,
    ) -> torch.Tensor:
        """`adapters` int32 `[m]`: each row's adapter, or -1; None: no row has one."""
        y = self._product(x, weight)
        if bias is not None:
            y = y + bias
        if adapters is None or self._bound is None:
            return y
        for number in np.unique(adapters[adapters >= 0]):
            delta = self._bound.adapters[number].get(weight.name)
            if delta is not None:
                at = torch.from_numpy(np.flatnonzero(adapters == number)).to(x.device)
                low = self._product(x[at], delta.down)
                y[at] = y[at] + self._product(low, delta.up) * delta.scale
        return y

    def rope(self, x: torch.Tensor, num_heads: int, rope: Rope) -> torch.Tensor:
        bound = self._rows()
        if rope not in self._rotary:
            table = elementary.RotaryTable(rope.frequencies, rope.factor, self.device)
            self._rotary[rope] = table
        cos, sin = self._rotary[rope].rows(bound.positions, bound.highest)
        cos, sin, half = cos[:, None, :], sin[:, None, :], cos.shape[1]
        heads = x.view(len(x), num_heads, -1)
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(turned, -1).flatten(-2)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, shape: Attention
    ) -> torch.Tensor:
        bound = self._rows()
        keys, values = bound.cache.keys[layer], bound.cache.values[layer]
        slots = bound.rows.slots[bound.index]
        kept = np.flatnonzero(slots >= 0)
        at = torch.from_numpy(slots[kept].astype(np.int64)).to(self.device)
        heads = (len(kept), shape.num_kv_heads, shape.head_dim)
        picked = torch.from_numpy(kept).to(self.device)
        format = bound.cache.format
        keys[at] = encode(format, k[picked].view(heads))
        values[at] = encode(format, v[picked].view(heads))
        out = torch.empty_like(q)
        for group in _row_groups(bound, shape):
            seen = visible(bound.rows, bound.index[group], layer, shape.window)
            table = torch.from_numpy(seen.slots).to(self.device)
            place = torch.from_numpy(group).to(self.device)
            out[place] = _attend(q[place], keys, values, format, table, shape)
        return out

    def gated(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        return elementary.ACTIVATIONS[activation](gate) * up

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return elementary.tanh(x / cap) * cap

    def experts(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate: list[Weight],
        up: list[Weight],
        down: list[Weight],
        top_k: int,
        normalise: bool,
        activation: str,
    ) -> torch.Tensor:
        shares = routed(router, top_k, normalise)
        adapters = self._adapters()
        out = torch.zeros_like(x)
        for expert in range(len(gate)):
            at = shares[:, expert].nonzero().squeeze(-1)
            if not len(at):
                continue
            own = None if adapters is None else adapters[at.cpu().numpy()]
            rows = x[at]
            inner = self.gated(
                self._linear(rows, gate[expert], None, own),
                self._linear(rows, up[expert], None, own),
                activation,
            )
            y = self._linear(inner, down[expert], None, own)
            out[at] = out[at] + y * shares[at, expert].unsqueeze(-1)
        return out

    def _adapters(self) -> np.ndarray | None:
        """Each bound row's adapter, or -1; None where no row has one."""
        if self._bound is None or self._bound.rows.adapters is None:
            return None
        chosen: np.ndarray = self._bound.rows.adapters[self._bound.index]
        return chosen

    def _rows(self) -> _Bound:
        if self._bound is None:
            raise RuntimeError("bind the rows of the pass before its operations")
        return self._bound


def routed(router: torch.Tensor, top_k: int, normalise: bool) -> torch.Tensor:
    """Each expert's share of each row, float32 `[m, experts]`, 0 where it is not chosen."""
    shares = elementary.softmax(router)
    order = torch.sort(shares, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = torch.zeros_like(shares).scatter(1, order, shares.gather(1, order))
    if normalise:
        chosen = chosen / elementary.tree_sum(chosen).unsqueeze(-1)
    return chosen


def _row_groups(bound: _Bound, shape: Attention) -> Iterator[np.ndarray]:
    """Rows of similar length, few enough that a group's products fit a processor's cache."""
    counts = lengths(bound.rows, bound.index)
    order = np.argsort(counts, kind="stable")
    per_position = shape.num_heads * shape.head_dim
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order):
            width = -(-int(counts[order[stop]]) // KEY_BLOCK) * KEY_BLOCK
            if (stop + 1 - start) * width * per_position > _GROUP:
                break
            stop += 1
        yield order[start:stop]
        start = stop


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    format: str,
    table: torch.Tensor,
    shape: Attention,
) -> torch.Tensor:
    """Attention of q `[m, heads * head_dim]` over the slots in `table` `[m, width]`, -1 hidden.

    The largest score is found first; it depends on no order. Then each block of `KEY_BLOCK`
    positions is summed by halves, and the blocks are added in the order of their positions, so
    that blocks in which a row sees nothing add zeros.
    """
    rows, group = q.shape[0], shape.num_heads // shape.num_kv_heads
    seen = (table >= 0)[:, None, None, :]
    query = q.view(rows, shape.num_kv_heads, group, 1, shape.head_dim)
    slots = table.clamp(min=0)
    key = decode(format, keys[slots], shape.head_dim).transpose(1, 2).unsqueeze(2)
    scores = elementary.tree_sum(query * key) * shape.scale
    if shape.softcap is not None:
        scores = elementary.tanh(scores / shape.softcap) * shape.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if not scores.shape[-1]:
        return torch.zeros_like(q)
    most = scores.amax(-1, keepdim=True)
    most = most.masked_fill(most == float("-inf"), 0.0)
    weights = elementary.exp(scores - most).masked_fill(~seen, 0.0)
    value = decode(format, values[slots], shape.head_dim).transpose(1, 2).unsqueeze(2)
    # A hidden slot may hold anything, and 0 times infinity is not 0.
    value = value.masked_fill(~seen.unsqueeze(-1), 0.0)
    blocks = (*weights.shape[:-1], -1, KEY_BLOCK)
    sums = elementary.tree_sum(weights.view(blocks))
    parts = (weights.unsqueeze(-1) * value).view(*blocks, shape.head_dim)
    parts = elementary.tree_sum(parts, -2)
    total, result = torch.zeros_like(sums[..., 0]), torch.zeros_like(parts[..., 0, :])
    for block in range(sums.shape[-1]):
        total = total + sums[..., block]
        result = result + parts[..., block, :]
    total = total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return (result / total).reshape(rows, -1)
