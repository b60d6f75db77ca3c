"""Batch-invariant matrix products, made with a BLAS that does not guarantee them.

Every BLAS computes a product of one row and a product of sixty rows with different code and
different bits. So rows are multiplied in zero-padded tiles of constant size, always with the same
call. Whether a row's index in the tile changes its bits is tested once per shape; where it does,
rows are multiplied one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.kernels.torch_arrays import as_tensor

#: Tile sizes to test, the smallest first. A larger one is used only if it gives the same bits.
TILES = (8, 64)

# Odd row lengths lead to unaligned rows, for which libraries choose kernels by address.
_ALIGN = 16

# A weight is dequantised and multiplied in groups of about this many values, to limit memory.
GROUP_VALUES = 1 << 20


class TiledProduct:
    """x @ w.T for float32 x `[n, in]`: each result row depends on its own input row alone."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._moved: dict[Weight, list[tuple[int, torch.Tensor]]] = {}  # float32, on a device

    def __call__(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """`[n, out_features]` float32."""
        x = _padded(x)
        out = x.new_empty(x.shape[0], weight.out_features)
        for first, matrix in self._groups(weight, x.device):
            self._multiply(x, _padded(matrix), out[:, first : first + len(matrix)])
        return out

    def _groups(self, weight: Weight, device: torch.device) -> Iterable[tuple[int, torch.Tensor]]:
        """(first row, float32 rows) of a weight on `device`. Weights are dequantised for each
        product in main memory, and once on another device."""
        if device.type == "cpu":
            return _dense_groups(weight)
        if weight not in self._moved:
            self._moved[weight] = [(i, rows.to(device)) for i, rows in _dense_groups(weight)]
        return self._moved[weight]

    def tiles(self, matrix: torch.Tensor) -> tuple[int, ...]:
        """Tile sizes that give the same bits for this shape; (1,) where none does."""
        key = (tuple(matrix.shape), matrix.device, matrix.data_ptr() % 64)
        if key not in self._tiles:
            self._tiles[key] = _probe(matrix)
        return self._tiles[key]

    def _multiply(self, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
        tiles = self.tiles(matrix)
        start, count = 0, x.shape[0]
        while start < count:
            left = count - start
            size = max((tile for tile in tiles if tile <= left), default=tiles[0])
            taken = min(size, left)
            out[start : start + taken] = _tile(x[start : start + taken], matrix, size)
            start += taken


def _tile(x: torch.Tensor, matrix: torch.Tensor, size: int) -> torch.Tensor:
    """One call of constant shape, on buffers with the allocator's alignment."""
    buffer = x.new_zeros(size, x.shape[1])
    buffer[: x.shape[0]] = x
    out = x.new_empty(size, matrix.shape[0])
    torch.mm(buffer, matrix.t(), out=out)
    return out[: x.shape[0]]


def _probe(matrix: torch.Tensor) -> tuple[int, ...]:
    """Which of `TILES` give a row the same bits at every index and with any other rows."""
    generator = torch.Generator().manual_seed(matrix.shape[0] * 31 + matrix.shape[1])
    # Random data with the same alignment: a model's own numbers may hide a difference in the order
    # of summation.
    offset = matrix.data_ptr() % 64 // matrix.element_size()
    buffer = torch.empty(matrix.numel() + offset, device=matrix.device)
    other = buffer[offset:].view(matrix.shape)
    other.copy_(torch.randn(matrix.shape, generator=generator))
    rows = torch.randn(TILES[-1], matrix.shape[1], generator=generator).to(matrix.device)
    expected = _tile(rows[: TILES[0]], other, TILES[0])
    invariant: list[int] = []
    for size in TILES:
        step = size // TILES[0]
        results = [
            _tile(torch.roll(rows[:size], shift, 0), other, size).roll(-shift, 0)
            for shift in range(0, size, step)
        ]
        same = all(torch.equal(result, results[0]) for result in results)
        if not same or not torch.equal(results[0][: TILES[0]], expected):
            break
        invariant.append(size)
    return tuple(invariant) or (1,)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Pad rows with zeros to an aligned length; they change no sum."""
    missing = -x.shape[1] % _ALIGN
    return torch.nn.functional.pad(x, (0, missing)) if missing else x.contiguous()


def _dense_groups(weight: Weight) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, float32 rows) of a weight, group by group."""
    step = max(64, GROUP_VALUES // weight.in_features // 64 * 64)
    for first in range(0, weight.out_features, step):
        data = weight.data[first : first + step]
        if weight.format != "F32" or weight.scale != 1:
            data = dequantize(replace(weight, out_features=len(data), data=data))
        yield first, as_tensor(data)
