"""Main memory straight from the system, in pages of the size that suits its use."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys


def anonymous(size: int, huge: bool = False) -> mmap.mmap:
    """`size` zeroed bytes that take room as they are first used. `huge`: in huge pages where the
    system has them, which it gives to private memory alone; good for what is read from end to end,
    and a waste for what is used here and there."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 6),
    ]


def memory_bytes() -> int | None:
    """Physical memory in bytes; None where the system does not tell."""
    if sys.platform == "win32":
        status = _MemoryStatus(ctypes.sizeof(_MemoryStatus))
        found = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return status.total if found else None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
