"""Writes stored blocks of keys and values into a cache, layer by layer, on a thread of its own."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.kernels.cache import cache_dtype
from anydecode.kernels.host import store
from anydecode.kernels.interface import Array, KeyValues
from anydecode.memory.pool import Slots


def block_bytes(cache: KeyValues, num_slots: int) -> int:
    """Bytes of a block of so many slots."""
    return sum(_num_bytes(cache, array, num_slots) for array in cache.arrays)


class LayerLoad:
    """Blocks that are to be written into a cache.

    Args:
        cache: The cache. A block has the bytes of its slots in each of `cache.arrays`, in order.

    Attributes:
        num_loaded: The number of layers whose keys and values have been written.
    """

    def __init__(self, cache: KeyValues) -> None:
        self._cache = cache
        self._blocks: list[tuple[Slots, bytes]] = []
        self.num_loaded = 0
        self._progress = threading.Condition()
        self._is_running = False
        self._writing = threading.Lock()

    @property
    def is_in_main_memory(self) -> bool:
        """Whether another thread may write while a pass runs."""
        return isinstance(self._cache.keys[0], np.ndarray)

    @property
    def num_layers(self) -> int:
        return len(self._cache.keys)

    def add(self, slots: Slots, block: bytes) -> None:
        """Add a block of `block_bytes`, before `start`."""
        self._blocks.append((slots, block))

    def start(self) -> None:
        """Start to write, if this has not been done. `wait` writes what the thread does not."""
        with self._progress:
            if self._is_running:
                return
            self._is_running = True
        thread = threading.Thread(target=self._run, name="anydecode-layer-load", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads
            self._stop_running()

    def wait(self, layers: int) -> None:
        """Wait until the first `layers` layers are written."""
        with self._progress:
            self._progress.wait_for(lambda: self.num_loaded >= layers or not self._is_running)
        self._load(layers)

    def _run(self) -> None:
        try:
            with contextlib.suppress(Exception):  # `wait` tries again and raises it
                self._load(self.num_layers)
        finally:
            self._stop_running()

    def _stop_running(self) -> None:
        with self._progress:
            self._is_running = False
            self._progress.notify_all()

    def _load(self, layers: int) -> None:
        """Write the layers before `layers` that are not written. Two passes may need them at the
        same time, and each layer is written by one thread."""
        while self.num_loaded < layers:
            with self._writing:
                if self.num_loaded < layers:
                    self.load_layer(self.num_loaded)
                    with self._progress:
                        self.num_loaded += 1
                        self._progress.notify_all()

    def load_layer(self, layer: int) -> None:
        """Write one layer of all blocks."""
        slots = np.concatenate([slots for slots, _ in self._blocks])
        for array, offset in self._arrays(layer):
            dtype, shape = _dtype(self._cache, array), tuple(array.shape[1:])
            count = len(self._blocks[0][0]) * math.prod(shape)
            parts = [np.frombuffer(block, dtype, count, offset) for _, block in self._blocks]
            store(array, slots, np.concatenate(parts).reshape(len(slots), *shape))

    def _arrays(self, layer: int) -> Iterator[tuple[Array, int]]:
        """The arrays of a layer, and where they begin in a block."""
        cache, offset, num_slots = self._cache, 0, len(self._blocks[0][0])
        layers = [*range(self.num_layers), *range(self.num_layers), *cache.inputs]
        for array, of in zip(cache.arrays, layers, strict=True):
            if of == layer:
                yield array, offset
            offset += _num_bytes(cache, array, num_slots)


def _dtype(cache: KeyValues, array: Array) -> np.dtype[Any]:
    return array.dtype if isinstance(array, np.ndarray) else cache_dtype(cache.format)


def _num_bytes(cache: KeyValues, array: Array, num_slots: int) -> int:
    return num_slots * math.prod(array.shape[1:]) * _dtype(cache, array).itemsize
