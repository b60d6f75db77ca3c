"""Weights in the layout of the C kernels, packed once at load into huge pages."""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref

import numpy as np

from anydecode.kernels import ptq161
from anydecode.kernels.formats import check_weight
from anydecode.kernels.grids import GRID_FORMATS, grid
from anydecode.kernels.interface import Weight
from anydecode.kernels.library import FORMAT_CODES, Library, Matrix
from anydecode.kernels.mapped import address_of, release_mapped
from anydecode.kernels.pages import map_anonymous

#: Formats whose products read float32 rows; products of the others read rows quantised to int8.
FLOAT_FORMATS = ("F32", "F16", "BF16", "PTQ161")
#: Output columns that are stored together.
GROUP = 16
_CHUNK = 1 << 25
_HUGE = 1 << 21  # bytes of a huge page


class Packer:
    """Packs each `Weight` once and keeps the packed matrix as long as the packer exists.

    A packed matrix needs the bytes of the stored one, and at most 4% more; IQ3_XXS needs 8%, IQ2_XS
    11%, IQ2_XXS 12%, TQ1_0 22% and IQ3_S 25% more.

    The packer holds no reference to the `Weight` and its stored bytes. With `free_weights`, it
    frees the stored bytes of each `Weight`, so that a model that was converted is not in memory
    twice.
    """

    def __init__(self, library: Library, threads: int, free_weights: bool = False) -> None:
        self._library = library
        self._free_weights = free_weights
        self._threads = threads
        self._chunks: list[mmap.mmap] = []
        self._chunk_left = 0
        self._next_address = 0
        self._packed: weakref.WeakKeyDictionary[Weight, Matrix] = weakref.WeakKeyDictionary()
        self._matrices: list[Matrix] = []
        self._tables: list[np.ndarray] = []
        self.num_bytes = 0
        self.has_quantised = False  # whether any packed weight is quantised

    def pack(self, weight: Weight) -> Matrix:
        """The packed matrix of a weight, packed at its first use."""
        matrix = self._packed.get(weight)
        if matrix is None:
            matrix = self._packed[weight] = self._pack(weight)
            self._matrices.append(matrix)
            if self._free_weights:
                weight.free()
        return matrix

    def packed_bytes(self, weight: Weight) -> int:
        """The bytes of the packed matrix of a weight."""
        matrix = self.pack(weight)
        return -(-int(matrix.out_features) // GROUP) * int(matrix.group_bytes)

    def _pack(self, weight: Weight) -> Matrix:
        check_weight(weight)
        code = FORMAT_CODES[weight.format]
        group_bytes = int(self._library.group_bytes(code, weight.in_features))
        size = -(-weight.out_features // GROUP) * group_bytes
        data = np.ascontiguousarray(weight.data)
        points = grid_table(weight.format) if weight.format in GRID_FORMATS else None
        matrix = Matrix(
            self._allocate(size), None if points is None else points.ctypes.data, group_bytes, code,
            weight.out_features, weight.in_features, weight.scale, self._columns(weight),
            self._order(weight),
        )  # fmt: skip
        self._library.repack(ctypes.byref(matrix), address_of(data), data.strides[0], self._threads)
        release_mapped(weight.data)
        self.num_bytes += size
        self.has_quantised |= weight.format not in FLOAT_FORMATS
        return matrix

    def _columns(self, weight: Weight) -> int | None:
        """The address of the order and the scales of the inputs of PTQ161; None for others."""
        if weight.columns is None:
            return None
        return self._keep(ptq161.column_table(weight.columns))

    def _order(self, weight: Weight) -> int | None:
        """The address of the order of the stored inputs; None where it is theirs."""
        return None if weight.order is None else self._keep(weight.order)

    def _keep(self, table: np.ndarray) -> int:
        """The address of an array that is kept as long as the matrices."""
        self._tables.append(table)
        self.num_bytes += table.nbytes
        return address_of(table)

    def _allocate(self, size: int) -> int:
        """The address of `size` new bytes, aligned to cache lines."""
        size = -(-size // 64) * 64
        if size > self._chunk_left:
            total = -(-max(size, _CHUNK) // _HUGE) * _HUGE + _HUGE
            chunk = map_anonymous(total, huge=True)
            self._chunks.append(chunk)
            start = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
            self._next_address = -(-start // _HUGE) * _HUGE
            self._chunk_left = start + total - self._next_address
        address = self._next_address
        self._next_address += size
        self._chunk_left -= size
        return address


@functools.cache
def grid_table(format: str) -> np.ndarray:
    """The points of a format as the kernels read them, uint8 `[points, 8 or 4]`: offset by 128, and
    in IQ1 by the 1 by which they are moved up."""
    points = grid(format).astype(np.int16) + (129 if format.startswith("IQ1") else 128)
    return points.astype(np.uint8)


def float_vector(vector: np.ndarray) -> np.ndarray:
    """A contiguous float32 copy or view, padded with zeros to a multiple of eight numbers."""
    flat = np.ascontiguousarray(vector, np.float32).reshape(-1)
    return flat if flat.size % 8 == 0 else np.pad(flat, (0, -flat.size % 8))
