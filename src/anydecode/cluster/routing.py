"""Where a task runs: the worker that has to compute the fewest rows before it.

The proxy remembers which blocks of prompts each worker has computed, as a list of the most recent
ones of the size of the worker's cache. The list may be wrong in both directions: a block that is
gone is computed again, one that is not listed costs a saving. No answer depends on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from anydecode.memory.prefix import BLOCK

#: What a running task costs a new one on the same worker, in rows: a pass is shared with it.
ROWS_PER_TASK = 32


class CachedBlocks:
    """The digests of the blocks that a worker has computed, the most recently used ones.

    Args:
        positions: Size of the worker's cache.
    """

    def __init__(self, positions: int) -> None:
        self._max_blocks = max(1, positions // BLOCK)
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def num_matched(self, digests: Sequence[bytes]) -> int:
        """The number of leading blocks that are there."""
        for number, digest in enumerate(digests):
            if digest not in self._digests:
                return number
        return len(digests)

    def add(self, digests: Iterable[bytes]) -> None:
        """The worker computes these blocks, or uses them."""
        for digest in digests:
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._max_blocks:
            self._digests.popitem(last=False)


def rows_before(num_uncached: int, pending_rows: int, num_tasks: int) -> int:
    """The cost of a place, in rows: those of the task, those that wait before it, and the share of
    the tasks that run beside it."""
    return num_uncached + pending_rows + ROWS_PER_TASK * num_tasks
