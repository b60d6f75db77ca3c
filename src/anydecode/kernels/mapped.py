"""Arrays over mapped memory: their addresses, their pages, and arrays of zeros."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np

from anydecode.kernels.pages import map_anonymous


def release_mapped(array: np.ndarray) -> None:
    """Drop the pages of a mapped file under `array` from this process's memory; the file is read
    again where they are used again. Arrays that are no unchanged view of a private file mapping are
    left as they are."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    offset = address_of(array) - address_of(np.frombuffer(owner, np.uint8))
    first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    length = offset + array.nbytes - first
    if array.flags.c_contiguous and length >= mmap.PAGESIZE:
        owner.madvise(mmap.MADV_DONTNEED, first, length // mmap.PAGESIZE * mmap.PAGESIZE)


def address_of(array: np.ndarray) -> int:
    """The address of an array's first number."""
    return int(array.__array_interface__["data"][0])


def mapped_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array of zeros that occupies physical memory from its first use."""
    count = math.prod(shape)
    flat = np.frombuffer(map_anonymous(max(1, count * dtype.itemsize)), dtype, count)
    return flat.reshape(shape)
