"""The reference backend, in torch, on any device: batch-invariant to the bit.

A row's result does not depend on the other rows of the pass, on their number or on its index among
them. Matrix products use tiles of constant shape; all else is elementwise, with sums in a fixed
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from anydecode.kernels import elementary
from anydecode.kernels.cache import (
    CACHE_FORMATS,
    decode,
    encode,
    round_queries,
    stored_width,
)
from anydecode.kernels.formats import DTYPES, dequantize, dequantize_rows
from anydecode.kernels.host import to_host
from anydecode.kernels.interface import (
    KEY_BLOCK,
    Activation,
    Adapter,
    Attention,
    Backend,
    Biases,
    CappedSwiglu,
    ClampedSwiglu,
    ExpertWeights,
    KeyValues,
    LimitedSwiglu,
    NgramHash,
    Recurrence,
    RecurrenceWeights,
    RelativePositions,
    Rope,
    Routing,
    Rows,
    SituGlu,
    Weight,
    WkvWeights,
    Xielu,
)
from anydecode.kernels.recurrent import Scan, windows
from anydecode.kernels.scan import convolve, run_scan
from anydecode.kernels.tiled import TiledProduct
from anydecode.kernels.torch_arrays import DeviceCopies, as_numpy, as_tensor
from anydecode.kernels.visibility import lengths, visible_slots

# Attention processes rows in groups with about this many products of queries and keys.
_GROUP = 1 << 18
# Added to the sum that the weights of experts are divided by: sigmoid scores may all be zero.
_MIN_SHARE = 1e-20

#: The fields of `Rows` that say what a row sees.
_SEEN = ("table", "prefix", "tail_start", "tail_length")


@dataclass(eq=False)
class _BoundRows:
    """The bound rows of a pass, with its cache and adapters."""

    rows: Rows
    index: np.ndarray  # int64 [m], indices of rows of the pass
    cache: KeyValues
    adapters: Sequence[Adapter]
    positions: torch.Tensor  # int64 [m]
    max_position: int
    scan: Scan | None  # of the recurrences
    selected: dict[int, np.ndarray]  # positions that layers have selected, by row of the pass
    windows: dict[int, torch.Tensor] = field(default_factory=dict)  # by size, see `windows`
    shared: dict[Any, torch.Tensor] = field(default_factory=dict)


class ReferenceBackend(Backend):
    """Values are float32 tensors `[m, width]` on `device`.

    `bind` must precede the operations that depend on rows: `rope`, `attention`, `add_positions`,
    and `linear` with adapters.
    """

    name = "reference"

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self._product = TiledProduct()
        self._vector = DeviceCopies(self.device)
        self._rotary: dict[Rope, elementary.RotaryTable] = {}
        self._position_tables: dict[Weight, torch.Tensor] = {}
        self._bound: _BoundRows | None = None
        self._selected: tuple[Rows | None, dict[int, np.ndarray]] = (None, {})

    def bind(
        self,
        rows: Rows,
        index: np.ndarray,
        cache: KeyValues,
        adapters: Sequence[Adapter] = (),
        scan: Scan | None = None,
    ) -> None:
        """Set the rows of the values that follow: the rows `index` of the pass `rows`. `scan` has
        the steps of their recurrences, if there are any with a state."""
        index = index.astype(np.int64)
        positions = rows.positions[index].astype(np.int64)
        if self._selected[0] is not rows:
            self._selected = rows, {}
        self._bound = _BoundRows(
            rows,
            index,
            cache,
            adapters,
            torch.from_numpy(positions).to(self.device),
            int(positions.max(initial=0)),
            scan,
            self._selected[1],
        )

    def unbind(self) -> None:
        """Detach the values that follow from any pass: no adapters, no attention."""
        self._bound = None

    def rms_norm(
        self, x: torch.Tensor, weight: np.ndarray | None, eps: float, groups: int = 1
    ) -> torch.Tensor:
        parts = x.view(*x.shape[:-1], groups, x.shape[-1] // groups)
        mean = elementary.tree_sum(parts * parts).unsqueeze(-1) / parts.shape[-1]
        parts = parts / torch.sqrt(mean + eps)
        if weight is not None:
            factor = self._vector(weight)
            parts = parts * (factor.view(groups, -1) if weight.size == x.shape[-1] else factor)
        return parts.flatten(-2)

    def linear(
        self, x: torch.Tensor, weight: Weight, bias: np.ndarray | None = None
    ) -> torch.Tensor:
        return self._linear(x, weight, bias, self._adapters())

    def _linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: np.ndarray | None,
        adapters: np.ndarray | None,
    ) -> torch.Tensor:
        """`adapters` int32 `[m]`: each row's adapter, or -1; None: no row has one."""
        y = self._product(x, weight)
        if bias is not None:
            y = y + self._vector(bias)
        if adapters is None or self._bound is None:
            return y
        for number in np.unique(adapters[adapters >= 0]):
            update = self._bound.adapters[number].get(weight.name)
            if update is not None:
                index = torch.from_numpy(np.flatnonzero(adapters == number)).to(x.device)
                low = self._product(x[index], update.down)
                y[index] = y[index] + self._product(low, update.up) * update.scale
        return y

    def grouped_linear(self, x: torch.Tensor, weights: Sequence[Weight]) -> torch.Tensor:
        parts = x.chunk(len(weights), -1)
        products = [self.linear(part, w) for part, w in zip(parts, weights, strict=True)]
        return torch.cat(products, -1)

    def split(
        self, x: torch.Tensor, size: int, groups: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = x.view(len(x), groups, x.shape[-1] // groups)
        return parts[..., :size].flatten(-2), parts[..., size:].flatten(-2)

    def join(self, x: torch.Tensor, y: torch.Tensor, groups: int = 1) -> torch.Tensor:
        parts = [z.view(len(z), groups, z.shape[-1] // groups) for z in (x, y)]
        return torch.cat(parts, -1).flatten(-2)

    def rope(self, x: torch.Tensor, num_heads: int, rope: Rope) -> torch.Tensor:
        if rope not in self._rotary:
            table = elementary.RotaryTable(rope, self.device)
            self._rotary[rope] = table
        positions, longest = self.rope_positions(len(x))
        if rope.shift:
            positions = (positions + rope.shift).clamp(min=0)
        cos, sin = self._rotary[rope].rows(positions, max(longest, longest + rope.shift))
        cos, sin, half = cos[:, None, :], sin[:, None, :], cos.shape[1]
        heads = x.view(len(x), num_heads, -1)
        if rope.has_last_pairs:
            rest, pairs = heads[..., : -2 * half], heads[..., -2 * half :]
            first, second = pairs[..., ::2], pairs[..., 1::2]
            turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
            return torch.cat((rest, turned.flatten(-2)), -1).flatten(-2)
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        rotated = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(rotated, -1).flatten(-2)

    def rope_positions(self, count: int) -> tuple[torch.Tensor, int]:
        """The positions of the `count` rows, int64, and the largest of them."""
        bound = self._rows()
        return bound.positions, bound.max_position

    def store(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: int,
        shape: Attention,
        index_key: torch.Tensor | None = None,
    ) -> None:
        bound = self._rows()
        keys, values = self._stored(layer)
        slots = bound.rows.slots[bound.index]
        stored = np.flatnonzero(slots >= 0)
        target = torch.from_numpy(slots[stored].astype(np.int64)).to(self.device)
        heads = (len(stored), shape.num_stored_keys)
        stored_rows = torch.from_numpy(stored).to(self.device)
        format = bound.cache.format
        if k is not None:
            keys[target] = _encode(format, k[stored_rows].view(*heads, shape.head_dim))
        if v is not None:
            size = len(stored), shape.num_kv_heads, shape.value_dim
            encoded = _encode(format, v[stored_rows].view(size))
            values[target, : shape.num_kv_heads, : encoded.shape[-1]] = encoded
        if index_key is not None:
            encoded = _encode(format, index_key[stored_rows])
            values[target, -1, : encoded.shape[-1]] = encoded

    def select(
        self,
        q: torch.Tensor | None,
        weights: torch.Tensor | np.ndarray | None,
        num_heads: int,
        layer: int,
        shape: Attention,
    ) -> None:
        if q is None:
            return
        if isinstance(weights, np.ndarray):
            weights = self._vector(weights).expand(len(q), num_heads)
        bound, dim, top_k = self._rows(), shape.index_dim, shape.top_k
        assert dim is not None and top_k is not None, "the shape has an indexer"
        keys = self._stored(layer)[1][:, -1:]
        width = stored_width(bound.cache.format, dim)
        every, limit = shape.key_positions, top_k
        if shape.has_block_keys:
            limit //= every
        for group in _row_groups(bound, num_heads * dim):
            seen = lengths(bound.rows, bound.index[group])
            if seen.max(initial=0) // every <= limit:
                continue
            visible = visible_slots(
                bound.rows, bound.index[group], layer, replace(shape, window=None)
            )
            slots = np.ascontiguousarray(visible.slots[:, every - 1 :: every])
            table = torch.from_numpy(slots).to(self.device)
            index = torch.from_numpy(group).to(self.device)
            key = _decode(bound.cache.format, keys[table.clamp(min=0)][..., :width], dim)
            queries = q[index].view(len(group), num_heads, 1, dim)
            scores = elementary.tree_sum(queries * key.swapaxes(1, 2))
            if weights is not None:
                parts = scores.clamp(min=0.0) * weights[index].unsqueeze(-1)
                scores = elementary.tree_sum(parts, -2).unsqueeze(1)
            scores = scores.masked_fill((table < 0).unsqueeze(1), float("-inf"))
            positions = bound.positions[index] // shape.index_block
            chosen = as_numpy(_chosen_positions(scores, positions, shape))
            for row, count, found in zip(bound.index[group], seen, chosen, strict=True):
                if count // every <= limit:
                    continue
                if shape.has_block_keys:
                    behind = np.arange(count - count % every, count)
                    found = np.concatenate([found, behind[None]], -1)
                bound.selected[int(row)] = found

    def _selected_slots(self, rows: np.ndarray, slots: np.ndarray, selection: int) -> np.ndarray:
        """The slots `[m, width]` of rows of the pass; of those with selected positions only these,
        in order."""
        selected = self._rows().selected
        slots = slots.copy()
        for row, own in zip(rows.tolist(), slots, strict=True):
            if row in selected:
                positions = selected[row][selection]
                found = own[positions[positions < len(own)]]
                own[:] = -1
                own[: len(found)] = found
        return slots

    def _entry_slots(self, rows: np.ndarray, layer: int, shape: Attention) -> np.ndarray:
        """The slots `[m, width]` of the entries that rows of the pass attend to, and then those of
        the positions of their windows. Slots of entries follow those of all positions."""
        bound, every = self._rows(), shape.entry_size
        assert every is not None, "the shape has entries"
        visible = visible_slots(bound.rows, rows, layer, replace(shape, window=None)).slots
        near = visible_slots(bound.rows, rows, layer, shape).slots
        found = []
        for row, count, slots, window in zip(
            rows.tolist(), lengths(bound.rows, rows), visible, near, strict=True
        ):
            entries = slots[every - 1 : count : every]
            if shape.top_k is not None and row in bound.selected:
                entries = entries[bound.selected[row][0]]
            entries = np.where(entries < 0, -1, entries + bound.cache.num_slots)
            begin = max(0, int(bound.rows.positions[row]) + 1 - (shape.window or 0))
            found.append(np.concatenate([entries, window[begin:count]]))
        longest = max(map(len, found), default=0)
        table = np.full((len(found), -(-longest // KEY_BLOCK) * KEY_BLOCK), -1, np.int64)
        for own, slots in zip(table, found, strict=True):
            own[: len(slots)] = slots
        return table

    def _stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of all slots in a layer."""
        cache = self._rows().cache
        keys, values = cache.keys[layer], cache.values[layer]
        return as_tensor(keys, self.device), as_tensor(values, self.device)

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        shape: Attention,
        sinks: np.ndarray | None = None,
        biases: Biases | None = None,
    ) -> torch.Tensor:
        if shape.num_selections > 1:
            return self._attend_by_selection(q, layer, shape, sinks)
        return self._attend_heads(q, layer, shape, sinks, biases)

    def _attend_by_selection(
        self, q: torch.Tensor, layer: int, shape: Attention, sinks: np.ndarray | None
    ) -> torch.Tensor:
        """Attention whose heads have several selections, one after the other."""
        count = shape.num_selections
        heads, kv_heads = shape.num_heads // count, shape.num_kv_heads // count
        part = replace(shape, num_heads=heads, num_kv_heads=kv_heads)
        found = [
            self._attend_heads(
                queries,
                layer,
                part,
                None if sinks is None else sinks[number * heads : (number + 1) * heads],
                None,
                number,
            )
            for number, queries in enumerate(q.chunk(count, -1))
        ]
        return torch.cat(found, -1)

    def _attend_heads(
        self,
        q: torch.Tensor,
        layer: int,
        shape: Attention,
        sinks: np.ndarray | None,
        biases: Biases | None,
        selection: int = 0,
    ) -> torch.Tensor:
        """Attention of the heads of one selection."""
        bound = self._rows()
        heads = slice(selection * shape.num_kv_heads, (selection + 1) * shape.num_kv_heads)
        keys, values = self._stored(layer)
        if shape.entry_size is None:
            keys, values = keys[:, heads], values[:, heads]
        else:
            keys = keys.transpose(0, 1).flatten(0, 1).unsqueeze(1)
        format = bound.cache.format
        out = q.new_empty(len(q), shape.num_heads * shape.value_dim)
        sink_scores = None if sinks is None else self._vector(sinks)
        for group in _row_groups(bound, shape.num_heads * shape.head_dim):
            visible = visible_slots(bound.rows, bound.index[group], layer, shape)
            slots = visible.slots
            if shape.entry_size is not None:
                slots = self._entry_slots(bound.index[group], layer, shape)
            elif shape.top_k is not None:
                slots = self._selected_slots(bound.index[group], slots, selection)
            table = torch.from_numpy(slots).to(self.device)
            index = torch.from_numpy(group).to(self.device)
            if isinstance(biases, RelativePositions):
                key = _decode(format, keys[table.clamp(min=0)], shape.head_dim)
                added: torch.Tensor | None = self._relative(
                    shape, biases, q[index], key, bound.positions[index]
                )
            else:
                added = self._biases(shape, biases, bound.positions[index], visible.width)
            out[index] = _attend(q[index], keys, values, format, table, shape, added, sink_scores)
        return out

    def _biases(
        self, shape: Attention, biases: np.ndarray | None, positions: torch.Tensor, width: int
    ) -> torch.Tensor | None:
        """The biases of the scores by distance, `[m, kv_heads, group, width]`."""
        if shape.slopes is None and biases is None:
            return None
        distance = torch.arange(width, device=self.device) - positions[:, None]
        if biases is not None:
            reach = biases.shape[1] // 2
            columns = distance.clamp(-reach, reach) + reach
            found = self._vector(biases)[:, columns].swapaxes(0, 1)
            return found.reshape(len(positions), shape.num_kv_heads, -1, width)
        assert shape.slopes is not None
        if shape.is_two_sided:
            distance = -distance.abs()
        slopes = torch.tensor(shape.slopes, dtype=torch.float32, device=self.device)
        return slopes.view(1, shape.num_kv_heads, -1, 1) * distance[:, None, None, :].float()

    def _relative(
        self,
        shape: Attention,
        relative: RelativePositions,
        q: torch.Tensor,
        key: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """The same of relative positions; `key` is `[m, width, heads, head_dim]`."""
        reach, width = relative.reach, key.shape[1]
        queries = q.view(len(q), shape.num_heads, 1, shape.head_dim)
        columns = torch.from_numpy(relative.columns).to(self.device)
        found = []
        for query, keys, position in zip(queries, key.swapaxes(1, 2), positions, strict=True):
            distance = torch.arange(width, device=self.device) - position
            at = columns[distance.clamp(-reach, reach) + reach]
            of_query = elementary.tree_sum(query * self._vector(relative.keys)[:, at])
            of_key = elementary.tree_sum(keys * self._vector(relative.queries)[:, at])
            found.append((of_query + of_key) * shape.scale)
        return torch.stack(found).unsqueeze(2)

    def convolution(
        self, x: torch.Tensor, layer: int, shape: Recurrence, weights: RecurrenceWeights
    ) -> torch.Tensor:
        stored, table = self._store_inputs((x,), 0, layer), self._windows(shape.window)
        bias = self._optional(weights.conv_bias)
        return convolve(stored, table, shape, self._vector(weights.conv), bias)

    def shift(
        self,
        x: torch.Tensor,
        layer: int,
        shape: Recurrence,
        first: int,
        mixes: Sequence[np.ndarray],
    ) -> list[torch.Tensor]:
        stored, slots = self._store_inputs((x,), first, layer), self._windows(2)[:, 0]
        before = stored[slots.clamp(min=0), first : first + x.shape[-1]]
        change = before.masked_fill((slots < 0).unsqueeze(-1), 0.0) - x
        return [x + change * self._vector(mix) for mix in mixes]

    def ngram_rows(
        self, table: Weight, layer: int, shape: Recurrence, first: int, hashes: NgramHash
    ) -> torch.Tensor:
        bound = self._rows()
        tokens = bound.rows.tokens[bound.index]
        own = np.where(tokens < 0, hashes.end_token, tokens).astype(np.float32)
        stored = self._store_inputs((as_tensor(own[:, None], self.device),), first, layer)
        slots = self._windows(hashes.order).flip(-1)
        before = as_numpy(stored[slots.clamp(min=0), first]).astype(np.int64)
        rows = hashes.rows(np.where(as_numpy(slots) < 0, -1, before))
        found = dequantize_rows(table, rows.ravel())
        return as_tensor(found.reshape(len(rows), -1), self.device)

    def pool(
        self, x: torch.Tensor, layer: int, shape: Recurrence, first: int, bias: np.ndarray | None
    ) -> torch.Tensor:
        if bias is None:
            return self._means(x, layer, shape.window, first)
        size, groups, numbers = bias.shape
        out, bound = x.new_zeros(len(x), numbers), self._rows()
        stored = self._store_inputs((x,), first, layer)
        ends = torch.nonzero((bound.positions + 1) % size == 0).squeeze(-1)
        if not len(ends):
            return out
        slots = self._windows(groups * size)[ends]
        read = stored[slots.clamp(min=0), first : first + x.shape[-1]]
        read = read.view(len(ends), groups, size, 2, groups, numbers)
        number = torch.arange(groups, device=x.device)
        own = read.movedim(3, 0)[:, :, number, :, number].movedim((1, 2), (0, 1))
        gates = (own[1] + self._vector(bias).transpose(0, 1)).flatten(1, 2)
        missing = (slots < 0).unsqueeze(-1)
        largest = gates.masked_fill(missing, float("-inf")).amax(1, keepdim=True)
        weights = elementary.exp(gates - largest).masked_fill(missing, 0.0)
        sums = elementary.tree_sum(weights * own[0].flatten(1, 2), 1)
        out[ends] = sums / elementary.tree_sum(weights, 1)
        return out

    def _means(self, x: torch.Tensor, layer: int, size: int, first: int) -> torch.Tensor:
        """The means of the values of the last `size` positions of rows at the end of as many."""
        out, stored = torch.zeros_like(x), self._store_inputs((x,), first, layer)
        ends = torch.nonzero((self._rows().positions + 1) % size == 0).squeeze(-1)
        slots = self._windows(size)[ends]
        read = stored[slots.clamp(min=0), first : first + x.shape[-1]]
        out[ends] = elementary.tree_sum(read.masked_fill((slots < 0).unsqueeze(-1), 0.0), 1) / size
        return out

    def hyper_factors(
        self, x: torch.Tensor, streams: int, iterations: int, eps: float
    ) -> torch.Tensor:
        first = elementary.sigmoid(x[:, :streams]) + eps
        if x.shape[-1] == streams:
            return first
        second = elementary.sigmoid(x[:, streams : 2 * streams]) * 2.0
        matrix = x[:, 2 * streams :].reshape(len(x), streams, streams)
        matrix = (elementary.softmax(matrix) + eps).transpose(-1, -2)
        for number in range(2 * iterations - 1):
            if number:
                matrix = matrix.transpose(-1, -2)
            matrix = matrix / (elementary.tree_sum(matrix).unsqueeze(-1) + eps)
        matrix = matrix - torch.eye(streams, device=x.device)
        return torch.cat((first, second, matrix.flatten(-2)), -1)

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        return elementary.softmax(x)

    def collapse(self, x: torch.Tensor, factors: torch.Tensor, groups: int) -> torch.Tensor:
        parts, out = x.view(len(x), groups, -1), x.new_zeros(len(x), x.shape[-1] // groups)
        for part in range(groups):
            out = out + factors[:, part : part + 1] * parts[:, part]
        return out

    def stored(self, layer: int, shape: Recurrence, first: int, size: int) -> torch.Tensor:
        bound = self._rows()
        stored = as_tensor(bound.cache.inputs[layer], self.device)
        slots = torch.from_numpy(bound.rows.slots[bound.index].astype(np.int64)).to(self.device)
        return stored[slots, first : first + size]

    def _windows(self, size: int) -> torch.Tensor:
        """The slots of the last `size` positions of each row, see `windows`."""
        bound = self._rows()
        if size not in bound.windows:
            table = torch.from_numpy(windows(bound.rows, bound.index, size))
            bound.windows[size] = table.to(self.device)
        return bound.windows[size]

    def recurrence(
        self,
        x: torch.Tensor | None,
        gates: Sequence[torch.Tensor],
        layer: int,
        shape: Recurrence,
        weights: RecurrenceWeights | WkvWeights,
    ) -> torch.Tensor:
        bound = self._rows()
        assert bound.scan is not None
        inputs, first = (gates, shape.width) if x is None else ((x, *gates), 0)
        stored = self._store_inputs(inputs, first, layer)
        states = as_tensor(bound.cache.states.arrays[layer], self.device)
        vectors = {name: self._optional(value) for name, value in vars(weights).items()}
        return run_scan(bound.scan, stored, states, len(bound.index), shape, vectors)

    def _store_inputs(self, inputs: Sequence[torch.Tensor], first: int, layer: int) -> torch.Tensor:
        """Store inputs of a recurrence, from number `first` of a slot on; returns those of all
        slots."""
        bound = self._rows()
        stored = as_tensor(bound.cache.inputs[layer], self.device)
        slots = torch.from_numpy(bound.rows.slots[bound.index].astype(np.int64)).to(self.device)
        values = torch.cat(tuple(inputs), -1)
        stored[slots, first : first + values.shape[-1]] = values
        return stored

    def _optional(self, vector: np.ndarray | None) -> torch.Tensor | None:
        return None if vector is None else self._vector(vector)

    def gated(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        if isinstance(activation, ClampedSwiglu):
            return elementary.clamped_swiglu(gate, up, *activation)
        if isinstance(activation, CappedSwiglu):
            return elementary.capped_swiglu(gate, up, *activation)
        if isinstance(activation, LimitedSwiglu):
            return elementary.limited_swiglu(gate, up, *activation)
        if isinstance(activation, SituGlu):
            return elementary.situ_glu(gate, up, *activation)
        return elementary.ACTIVATIONS[activation](gate) * up

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return elementary.tanh(x / cap) * cap

    def clamp(self, x: torch.Tensor, limit: float) -> torch.Tensor:
        return x.clamp(-limit, limit)

    def multiply(self, x: torch.Tensor, factors: np.ndarray) -> torch.Tensor:
        return x * self._vector(factors)

    def cut_off(self, x: torch.Tensor, multiplier: float) -> torch.Tensor:
        mean = elementary.tree_sum(x).unsqueeze(-1) / x.shape[-1]
        centred = x - mean
        variance = elementary.tree_sum(centred * centred).unsqueeze(-1) / x.shape[-1]
        return (centred - torch.sqrt(variance) * multiplier).clamp(min=0.0)

    def match_magnitude(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        size, target = (elementary.tree_sum(y * y).unsqueeze(-1) / y.shape[-1] for y in (x, like))
        return x * (torch.sqrt(target) / torch.sqrt(size.clamp(min=1e-5)))

    def mix(self, x: torch.Tensor, coefficients: torch.Tensor, groups: int) -> torch.Tensor:
        parts, out = x.view(len(x), groups, -1), x.view(len(x), groups, -1)
        factors = coefficients.view(len(x), groups, groups)
        for part in range(groups):
            out = out + factors[:, :, part : part + 1] * parts[:, part : part + 1]
        return out.flatten(-2)

    def block_convolution(
        self, x: torch.Tensor, kernels: torch.Tensor, base: np.ndarray, mask_token: int
    ) -> torch.Tensor:
        bound, (taps, width) = self._rows(), base.shape
        tokens = bound.rows.tokens[bound.index]
        follows = torch.from_numpy(tokens == mask_token).to(self.device).unsqueeze(-1)
        parts = kernels.view(len(x), taps, -1)
        changes = parts.repeat_interleave(width // parts.shape[-1], -1)
        factors, before = self._vector(base) + changes, x
        out = factors[:, 0] * x
        for tap in range(1, taps):
            before = torch.cat([torch.zeros_like(x[:1]), before[:-1]]) * follows
            out = out + factors[:, tap] * before
        return out

    def spread(
        self, x: torch.Tensor, factors: torch.Tensor | np.ndarray, groups: int
    ) -> torch.Tensor:
        if isinstance(factors, np.ndarray):
            factors = self._vector(factors).expand(len(x), groups)
        return (factors[:, :, None] * x[:, None, :]).flatten(-2)

    def experts(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        activation: Activation,
    ) -> torch.Tensor:
        bias = weights.selection_bias
        vector = None if bias is None else self._vector(bias)
        blocks = None if routing.block_experts is None else self.shared(_SEEN, self._row_blocks)
        experts = None
        if weights.token_experts is not None:
            tokens = self._rows().rows.tokens[self._rows().index]
            is_known = (tokens >= 0) & (tokens < len(weights.token_experts))
            table = weights.token_experts[np.where(is_known, tokens, 0)]
            experts = torch.from_numpy(table.astype(np.int64)).to(self.device)
        shares = expert_shares(router, routing, vector, blocks, experts)
        if weights.factors is not None:
            shares = shares * self._vector(weights.factors)
        adapters = self._adapters()
        out = torch.zeros_like(x)
        for expert in range(len(weights.up)):
            index = shares[:, expert].nonzero().squeeze(-1)
            if not len(index):
                continue
            expert_adapters = None if adapters is None else adapters[index.cpu().numpy()]
            rows = x[index]
            gate_bias, up_bias, down_bias = (
                None if biases is None else biases[expert]
                for biases in (weights.gate_bias, weights.up_bias, weights.down_bias)
            )
            share = shares[index, expert].unsqueeze(-1)
            up = self._linear(rows, weights.up[expert], up_bias, expert_adapters)
            if weights.gate:
                gate = self._linear(rows, weights.gate[expert], gate_bias, expert_adapters)
                if routing.scales_inputs:
                    gate, up = gate * share, up * share
                inner = self.gated(gate, up, activation)
            else:
                assert isinstance(activation, str), "checked by `ModelSpec`"
                inner = self.activate(up, activation)
            y = self._linear(inner, weights.down[expert], down_bias, expert_adapters)
            if weights.output_factors is not None:
                assert routing.output_eps is not None, "checked by `Network`"
                factors = self._vector(weights.output_factors)
                y = self.rms_norm(y * factors, None, routing.output_eps)
            out[index] = out[index] + (y if routing.scales_inputs else y * share)
        for expert in range(len(weights.up), len(weights.up) + routing.num_identity):
            out = out + x * shares[:, expert].unsqueeze(-1)
        return out

    def expert_products(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        matrices: Sequence[Weight],
        routing: Routing,
        groups: int,
    ) -> torch.Tensor:
        count = routing.experts_per_token
        chosen, adapters = _first(router, count).sort(-1).values, self._adapters()
        out = x.new_zeros(len(x), count, matrices[0].out_features)
        for expert, matrix in enumerate(matrices):
            index, place = (chosen == expert).nonzero(as_tuple=True)
            if len(index):
                own = None if adapters is None else adapters[index.cpu().numpy()]
                out[index, place] = self._linear(x[index], matrix, None, own)
        return out.view(len(x), count, groups, -1).transpose(1, 2).flatten(1)

    def expert_sums(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        matrices: Sequence[Weight],
        routing: Routing,
        groups: int,
    ) -> torch.Tensor:
        count, shares = routing.experts_per_token, expert_shares(router, routing)
        chosen, adapters = _first(router, count).sort(-1).values, self._adapters()
        parts = x.view(len(x), groups, count, -1).transpose(1, 2).flatten(2)
        out = x.new_zeros(len(x), matrices[0].out_features)
        for expert, matrix in enumerate(matrices):
            index, place = (chosen == expert).nonzero(as_tuple=True)
            if len(index):
                own = None if adapters is None else adapters[index.cpu().numpy()]
                y = self._linear(parts[index, place], matrix, None, own)
                out[index] = out[index] + y * shares[index, expert].unsqueeze(-1)
        return out

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: np.ndarray,
        bias: np.ndarray | None,
        eps: float,
        groups: int = 1,
    ) -> torch.Tensor:
        parts = x.view(*x.shape[:-1], groups, x.shape[-1] // groups)
        centred = parts - elementary.tree_sum(parts).unsqueeze(-1) / parts.shape[-1]
        variance = elementary.tree_sum(centred * centred).unsqueeze(-1) / parts.shape[-1]
        y = (centred / torch.sqrt(variance + eps)).flatten(-2) * self._vector(weight)
        return y if bias is None else y + self._vector(bias)

    def activate(self, x: torch.Tensor, activation: str | Xielu) -> torch.Tensor:
        if isinstance(activation, Xielu):
            return elementary.xielu(x, *activation)
        return elementary.ACTIVATIONS[activation](x)

    def add_positions(self, x: torch.Tensor, table: Weight) -> torch.Tensor:
        if table not in self._position_tables:
            self._position_tables[table] = as_tensor(dequantize(table), self.device)
        rows = self._row_positions().clamp(max=table.out_features - 1)
        return x + self._position_tables[table][rows]

    def _row_positions(self) -> torch.Tensor:
        """The positions of the bound rows, int64 `[m]`."""
        return self._rows().positions

    def columns(self, x: torch.Tensor, first: int, size: int) -> torch.Tensor:
        return x[:, first : first + size].contiguous()

    def token_rows(self, table: Weight, factor: float, *, has_inputs: bool = False) -> torch.Tensor:
        bound = self._rows()
        tokens = bound.rows.tokens[bound.index].astype(np.int64)
        is_valid = (tokens >= 0) & (tokens < table.out_features)
        rows = dequantize_rows(table, np.where(is_valid, tokens, 0)) * np.float32(factor)
        if has_inputs and bound.rows.inputs is not None:
            rows[tokens < 0] = to_host(bound.rows.inputs)[bound.index][tokens < 0]
        return as_tensor(rows, self.device)

    def shared(self, key: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        values = self._rows().shared
        if key not in values:
            values[key] = compute()
        return values[key]

    def gate_parts(self, x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
        factors = elementary.ACTIVATIONS[activation](gate)
        return (x.view(len(x), gate.shape[-1], -1) * factors.unsqueeze(-1)).flatten(-2)

    def _adapters(self) -> np.ndarray | None:
        """Each bound row's adapter, or -1; None where no row has one."""
        if self._bound is None or self._bound.rows.adapters is None:
            return None
        chosen: np.ndarray = self._bound.rows.adapters[self._bound.index]
        return chosen

    def _row_blocks(self) -> torch.Tensor:
        """The number of each bound row's block, int64 `[m]`: consecutive rows that see the same."""
        rows, index = self._rows().rows, self._rows().index
        seen = [getattr(rows, name)[index] for name in _SEEN]
        is_new = np.any([np.diff(values) != 0 for values in seen], axis=0)
        numbers = np.concatenate([[0], np.cumsum(is_new)])
        return torch.from_numpy(numbers.astype(np.int64)).to(self.device)

    def _rows(self) -> _BoundRows:
        if self._bound is None:
            raise RuntimeError("`bind` must be called before the operations of a pass")
        return self._bound


def expert_shares(
    router: torch.Tensor,
    routing: Routing,
    selection_bias: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weight of each expert in each row, float32 `[m, experts]`; 0 where it is not chosen.

    `blocks` are the numbers of the rows' blocks, ascending from 0, int64 `[m]`, if experts are
    chosen per block; `experts` those of each row, int64 `[m, experts_per_token]`, if they are not
    chosen by scores.
    """
    if routing.scoring == "sparsemixer":
        return _sparse_shares(router, routing)
    if routing.scoring == "given":
        total = elementary.tree_sum(router).unsqueeze(-1) * routing.scale + 1e-5
        return router / total if routing.normalise else router
    function = {"sigmoid": elementary.sigmoid, "sqrtsoftplus": _root_softplus}
    shares = function.get(routing.scoring, elementary.softmax)(router)
    scores = router if routing.by_logits else shares
    choice = scores if selection_bias is None else scores + selection_bias
    if routing.block_experts is not None:
        assert blocks is not None
        index = blocks.unsqueeze(1).expand_as(choice)
        largest = torch.full_like(choice, float("-inf")).scatter_reduce(0, index, choice, "amax")
        used = _first(largest, routing.block_experts)
        is_used = torch.zeros_like(choice, dtype=torch.bool).scatter(1, used, True)
        choice = choice.masked_fill(~is_used[blocks], float("-inf"))
    if routing.num_groups > 1:
        groups = choice.view(len(choice), routing.num_groups, -1)
        largest = torch.sort(groups, dim=-1, descending=True).values
        score = largest[..., 0]
        if routing.scores_per_group == 2:
            score = score + largest[..., 1]
        used = _first(score, routing.groups_per_token)
        is_used = torch.zeros(groups.shape[:2], dtype=torch.bool, device=router.device)
        is_used = is_used.scatter(1, used, True).unsqueeze(-1)
        choice = groups.masked_fill(~is_used, float("-inf")).view(choice.shape)
    order = _first(choice, routing.experts_per_token) if experts is None else experts
    chosen = torch.zeros_like(shares).scatter_add(1, order, shares.gather(1, order))
    if routing.normalise:
        chosen = chosen / (elementary.tree_sum(chosen).unsqueeze(-1) + _MIN_SHARE)
    chosen = chosen if routing.scale == 1.0 else chosen * routing.scale
    if routing.logits_per_expert == 1:
        return chosen
    return elementary.tree_sum(chosen.view(len(chosen), -1, routing.logits_per_expert))


def _root_softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(elementary.softplus(x))


def _sparse_shares(router: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The weights of the scoring "sparsemixer"."""
    shares, left = torch.zeros_like(router), router
    for _ in range(routing.experts_per_token):
        best = _first(left, 1)
        largest = left.gather(1, best)
        factor = torch.maximum(router.abs(), largest)
        is_far = (largest - router) / factor > 2 * routing.jitter
        is_out = is_far | (left == float("-inf"))
        scores = elementary.exp(router - largest).masked_fill(is_out, 0.0)
        share = scores.gather(1, best) / elementary.tree_sum(scores).unsqueeze(-1)
        shares = shares.scatter(1, best, share)
        left = left.scatter(1, best, float("-inf"))
    return shares


def _first(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the `count` largest scores of each row, ties to the lower index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


def _row_groups(bound: _BoundRows, per_position: int) -> Iterator[np.ndarray]:
    """Groups of rows of similar length, whose products (`per_position` for each position) fit a
    processor's cache."""
    counts = lengths(bound.rows, bound.index)
    order = np.argsort(counts, kind="stable")
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


def _chosen_positions(scores: torch.Tensor, own: torch.Tensor, shape: Attention) -> torch.Tensor:
    """The selected positions `[m, selections, top_k]`, in order, from scores `[m, selections,
    width]` and the block of each row's own position."""
    size, width = shape.index_block, scores.shape[-1]
    assert shape.top_k is not None, "the shape has an indexer"
    if shape.has_block_keys:
        return _block_positions(scores, shape.top_k // size, size)
    padded = torch.nn.functional.pad(scores, (0, -width % size), value=float("-inf"))
    best = padded.reshape(*padded.shape[:-1], -1, size).amax(-1)
    behind = own[:, None, None] - torch.arange(best.shape[-1], device=scores.device)
    best = best.masked_fill((behind >= 0) & (behind < shape.local_blocks), float("inf"))
    return _block_positions(best, shape.top_k // size, size)


def _block_positions(scores: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """The positions of the `count` blocks with the largest scores `[m, selections, blocks]`."""
    found = _first(scores.flatten(0, 1), count).sort(-1).values
    blocks = found.view(*scores.shape[:2], count, 1)
    return (blocks * size + torch.arange(size, device=scores.device)).flatten(-2)


def _encode(format: str, x: torch.Tensor) -> torch.Tensor:
    """Float32 vectors `[..., head_dim]` in a cache format."""
    if CACHE_FORMATS[format] in DTYPES:
        return x.to(getattr(torch, format))
    return as_tensor(encode(format, as_numpy(x)), x.device)


def _decode(format: str, stored: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Vectors in a cache format as float32 `[..., head_dim]`."""
    if CACHE_FORMATS[format] in DTYPES:
        return stored.to(torch.float32)
    return as_tensor(decode(format, as_numpy(stored), head_dim), stored.device)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    format: str,
    table: torch.Tensor,
    shape: Attention,
    biases: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of q `[m, heads * head_dim]` over the slots in `table` `[m, width]`; -1 is masked.

    The maximum score is computed first; it does not depend on an order. Then each block of
    `KEY_BLOCK` positions is summed by halves, and the blocks are added in order of position, so
    that fully masked blocks add zeros.
    """
    rows, group = q.shape[0], shape.num_heads // shape.num_kv_heads
    mask = (table >= 0)[:, None, None, :]
    query = q.view(rows, shape.num_kv_heads, group, 1, shape.head_dim)
    if CACHE_FORMATS[format] not in DTYPES:
        query = as_tensor(round_queries(format, as_numpy(query)), q.device)
    slots = table.clamp(min=0)
    key = _decode(format, keys[slots], shape.head_dim).transpose(1, 2).unsqueeze(2)
    scores = elementary.tree_sum(query * key) * shape.scale
    if shape.softcap is not None:
        scores = elementary.tanh(scores / shape.softcap) * shape.softcap
    if biases is not None:
        scores = scores + biases
    scores = scores.masked_fill(~mask, float("-inf"))
    if not scores.shape[-1]:
        return q.new_zeros(rows, shape.num_heads * shape.value_dim)
    maximum = scores.amax(-1, keepdim=True)
    maximum = maximum.masked_fill(maximum == float("-inf"), 0.0)
    if sinks is not None:
        sinks = sinks.view(1, shape.num_kv_heads, group, 1)
        maximum = torch.maximum(maximum, sinks)
    weights = elementary.exp(scores - maximum).masked_fill(~mask, 0.0)
    if shape.latent_dim is None:
        size = shape.value_dim
        stored = values[slots][..., : stored_width(format, size)]
        value = _decode(format, stored, size).transpose(1, 2).unsqueeze(2)
    else:
        value = key[..., : shape.latent_dim]
    # A masked slot may hold anything, and 0 times infinity is not 0.
    value = value.masked_fill(~mask.unsqueeze(-1), 0.0)
    blocks = (*weights.shape[:-1], -1, KEY_BLOCK)
    sums = elementary.tree_sum(weights.view(blocks))
    parts = (weights.unsqueeze(-1) * value).view(*blocks, shape.value_dim)
    parts = elementary.tree_sum(parts, -2)
    total, result = torch.zeros_like(sums[..., 0]), torch.zeros_like(parts[..., 0, :])
    for block in range(sums.shape[-1]):
        total = total + sums[..., block]
        result = result + parts[..., block, :]
    if sinks is not None:
        total = total + elementary.exp(sinks - maximum).squeeze(-1)
    total = total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return (result / total).reshape(rows, -1)
