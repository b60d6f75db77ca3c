"""Anonymous memory mappings, and the size of physical memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys


def map_anonymous(size: int, huge: bool = False) -> mmap.mmap:
    """Map `size` zeroed bytes, which occupy physical memory from their first use.

    Args:
        size: Bytes.
        huge: Whether to use huge pages where the system has them (for private mappings only). They
            speed up sequential reads, and waste memory where the use is sparse.
    """
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
    """Physical memory in bytes; None where the system does not report it."""
    if sys.platform == "win32":
        status = _MemoryStatus(ctypes.sizeof(_MemoryStatus))
        succeeded = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return status.total if succeeded else None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
