"""Positions of a key-value cache in the compressed form of GEAR, and passes over them.

The compressed form of a block of positions lies in some of the slots that the block had; the others
are free. A pass runs layer by layer, over a cache of one layer that all layers use in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from anydecode.kernels.interface import KeyValues, Rows
from anydecode.kernels.mapped import mapped_zeros
from anydecode.kernels.routes import Guide, Route, RoutedPass
from anydecode.memory.codecs.gear import GearBlock
from anydecode.memory.pool import Slots
from anydecode.memory.sequence_cache import SequenceCache


@dataclass(frozen=True, eq=False)
class _Block:
    """Positions `start` to `stop`, whose compressed form is in `slots`. `codecs` are those of the
    keys and values of each layer."""

    start: int
    stop: int
    slots: Slots
    codecs: list[tuple[GearBlock, GearBlock]]


class CompressedPositions:
    """The positions of a sequence cache that are compressed; they are holes of its table.

    Args:
        kv_cache: The sequence cache, of float numbers in main memory.
        bits: Bits per code, see `GearBlock`.
        sparse: The share of numbers that are stored as they are.
    """

    def __init__(self, kv_cache: SequenceCache, bits: int, sparse: float) -> None:
        self._kv_cache, self._bits, self._sparse = kv_cache, bits, sparse
        self._blocks: list[_Block] = []

    def add(self, start: int, stop: int, rank: int) -> None:
        """Compress the positions `start` to `stop`, unless they would not become smaller."""
        if start == stop:
            return
        slots, cache = self._kv_cache.table[start:stop].copy(), self._kv_cache.pool.cache
        pairs = list(zip(cache.keys, cache.values, strict=True))
        codecs = [
            (self._codec(k, stop - start, rank, True), self._codec(v, stop - start, rank, False))
            for k, v in pairs
        ]
        count = max(
            -(-codec.num_bytes // _row_bytes(array))
            for arrays, both in zip(pairs, codecs, strict=True)
            for array, codec in zip(arrays, both, strict=True)
        )
        if count >= stop - start:
            return
        for arrays, both in zip(pairs, codecs, strict=True):
            for array, codec in zip(arrays, both, strict=True):
                data = np.zeros(count * _row_bytes(array), np.uint8)
                data[: codec.num_bytes] = codec.encode(array[slots])
                array[slots[:count]] = data.view(array.dtype).reshape(count, *array.shape[1:])
        kept = self._kv_cache.repurpose(start, stop, count)
        self._blocks.append(_Block(start, stop, kept, codecs))

    def restore(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Write the keys and values of a layer at all compressed positions into `keys` and
        `values`, which begin with position 0."""
        cache = self._kv_cache.pool.cache
        for block in self._blocks:
            arrays = (cache.keys[layer], keys), (cache.values[layer], values)
            for (stored, out), codec in zip(arrays, block.codecs[layer], strict=True):
                data = np.ascontiguousarray(stored[block.slots]).reshape(-1).view(np.uint8)
                out[block.start : block.stop] = codec.decode(data[: codec.num_bytes])

    def _codec(self, array: np.ndarray, rows: int, rank: int, keys: bool) -> GearBlock:
        heads, head_dim = array.shape[1:]
        return GearBlock(rows, heads, head_dim, keys, self._bits, rank, self._sparse, array.dtype)


def _row_bytes(array: np.ndarray) -> int:
    """Bytes of a slot."""
    return array[:1].nbytes


@dataclass(eq=False)
class CompressedGuide(Guide):
    """A guide that knows the compressed positions of its row's sequence."""

    positions: CompressedPositions = field(kw_only=True)


class CompressedPass(Route):
    """Runs rows of sequences some of whose positions are compressed, one layer after the other."""

    def run(self, routed: RoutedPass) -> None:
        cache = _OneLayerCache(routed.rows, routed.cache, routed.guides)
        routed.begin(cache.rows, cache.keys_and_values)
        active = np.arange(len(routed.guides))
        for layer in range(routed.num_layers):
            cache.load(layer)
            routed.run(active, layer, layer + 1)
            cache.save(layer)


class _OneLayerCache:
    """A cache with the positions of some sequences, one after the other, in the same memory for all
    layers.

    Attributes:
        rows: The rows of the pass, with the slots and tables of this cache.
        keys_and_values: The cache.
    """

    def __init__(self, rows: Rows, pool_cache: KeyValues, guides: list[CompressedGuide]) -> None:
        self._pool_slots, self._pool_cache = rows.slots, pool_cache
        self._sequences: list[tuple[int, Slots, CompressedPositions]] = []
        tables, slots = [np.empty(0, np.int32)] * len(rows.tables), rows.slots.copy()
        size = 0
        numbers, first_rows = np.unique(rows.table, return_index=True)
        for number, row in zip(numbers.tolist(), first_rows.tolist(), strict=True):
            table, is_own = rows.tables[number], rows.table == number
            self._sequences.append((size, table, guides[row].positions))
            tables[number] = np.arange(size, size + len(table), dtype=np.int32)
            slots[is_own] = tables[number][rows.positions[is_own]]
            size += len(table)
        self.rows = replace(rows, tables=tables, slots=slots)
        memory: dict[tuple[bool, tuple[int, ...]], np.ndarray] = {}

        def one_layer(array: np.ndarray, is_value: bool) -> np.ndarray:
            key = is_value, array.shape[1:]
            if key not in memory:
                heads, width = array.shape[1:]
                memory[key] = mapped_zeros((heads, size, width), array.dtype).swapaxes(0, 1)
            return memory[key]

        self.keys_and_values = KeyValues(
            [one_layer(array, False) for array in pool_cache.keys],
            [one_layer(array, True) for array in pool_cache.values],
            pool_cache.format,
        )

    def load(self, layer: int) -> None:
        """Fill the memory with the keys and values of a layer."""
        keys, values = self.keys_and_values.keys[layer], self.keys_and_values.values[layer]
        for start, table, positions in self._sequences:
            held = np.flatnonzero(table >= 0)
            keys[start + held] = self._pool_cache.keys[layer][table[held]]
            values[start + held] = self._pool_cache.values[layer][table[held]]
            stop = start + len(table)
            positions.restore(layer, keys[start:stop], values[start:stop])

    def save(self, layer: int) -> None:
        """Store the keys and values of the rows, which have run through the layer, in the pool."""
        for pool, own in (
            (self._pool_cache.keys, self.keys_and_values.keys),
            (self._pool_cache.values, self.keys_and_values.values),
        ):
            pool[layer][self._pool_slots] = own[layer][self.rows.slots]
