"""Main memory straight from the system, in pages of the size that suits its use."""

from __future__ import annotations

import mmap


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
