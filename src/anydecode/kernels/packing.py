"""Weights in the order the C kernels read them: packed once at load, side by side in huge pages."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch

from anydecode.kernels.formats import check_weight
from anydecode.kernels.interface import Weight
from anydecode.kernels.library import FORMAT_CODES, Library, Matrix
from anydecode.kernels.pages import anonymous

#: Formats whose products take rows as they are; the others take them in blocks of eight bits.
FLOAT_FORMATS = ("F32", "F16", "BF16")
_CHUNK = 1 << 25
_HUGE = 1 << 21  # bytes of a huge page


class Packer:
    """Packs each `Weight` once and keeps its matrix for as long as the packer lives.

    A packed matrix takes the bytes of the stored one, and at most 4% more. The stored bytes are
    not kept alive: whoever holds the `Weight` decides.
    """

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._chunks: list[mmap.mmap] = []
        self._left = 0
        self._next = 0
        self._packed: weakref.WeakKeyDictionary[Weight, Matrix] = weakref.WeakKeyDictionary()
        self._kept: list[Matrix] = []
        self.num_bytes = 0
        self.quantised = False  # whether any weight is

    def pack(self, weight: Weight) -> Matrix:
        """The packed form of a weight, made at its first use."""
        found = self._packed.get(weight)
        if found is None:
            found = self._packed[weight] = self._make(weight)
            self._kept.append(found)
        return found

    def _make(self, weight: Weight) -> Matrix:
        check_weight(weight)
        code = FORMAT_CODES[weight.format]
        group_bytes = int(self._library.group_bytes(code, weight.in_features))
        size = -(-weight.out_features // 8) * group_bytes
        data = weight.data.contiguous()
        if data.device.type != "cpu":
            raise ValueError(f"{weight.name or 'a weight'} is not in main memory")
        matrix = Matrix(
            self._room(size), group_bytes, code, weight.out_features, weight.in_features
        )
        row_bytes = data.stride(0) * data.element_size() if data.dim() == 2 else 0
        self._library.repack(ctypes.byref(matrix), data.data_ptr(), row_bytes, self._threads)
        self.num_bytes += size
        self.quantised |= weight.format not in FLOAT_FORMATS
        return matrix

    def _room(self, size: int) -> int:
        """The address of `size` fresh bytes, aligned to cache lines."""
        size = -(-size // 64) * 64
        if size > self._left:
            total = -(-max(size, _CHUNK) // _HUGE) * _HUGE + _HUGE
            chunk = anonymous(total, huge=True)
            self._chunks.append(chunk)
            start = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
            self._next = -(-start // _HUGE) * _HUGE
            self._left = start + total - self._next
        address = self._next
        self._next += size
        self._left -= size
        return address


def float_vector(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous float32 copy or view with whole lanes of eight readable."""
    flat = tensor.detach().to("cpu", torch.float32).contiguous().view(-1)
    if flat.numel() % 8 == 0:
        return flat
    padded = flat.new_zeros(-(-flat.numel() // 8) * 8)
    padded[: flat.numel()] = flat
    return padded
