"""Caches bounded by bytes, so that large entries cannot fill the memory."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache, wraps
from typing import Any, Generic, TypeVar
from weakref import WeakSet

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
#: Bytes counted for every entry beside its size: the key, the links and the counters.
ENTRY_BYTES = 512


#: All caches of this process.
_caches: WeakSet[ByteCache[Any, Any]] = WeakSet()


class ByteCache(Generic[Key, Value]):
    """The most recently used values whose sizes sum to at most `max_bytes`; safe for threads.

    A value larger than `max_bytes` is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._counted = 0
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()
        _caches.add(self)

    @property
    def num_bytes(self) -> int:
        """The size of all values, in bytes."""
        return self._counted

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def get(self, key: Key) -> Value | None:
        """The value of `key`; None if it is not kept."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Key, value: Value, size: int) -> None:
        """Keeps `value`, which takes `size` bytes, and drops those not used for longest."""
        size += ENTRY_BYTES
        with self._lock:
            self._drop(key)
            if size > self.max_bytes:
                return
            self._entries[key] = value, size
            self._counted += size
            self._limit()

    def grow(self, key: Key, value: Value, size: int, max_size: int) -> None:
        """Counts `size` more bytes for `value`, if it is kept for `key`, and drops those not used
        for longest. Drops `value` if it takes more than `max_size` bytes then."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry[0] is not value:
                return
            grown = entry[1] + size
            if grown > min(self.max_bytes, max_size + ENTRY_BYTES):
                self._drop(key)
                return
            self._entries[key] = value, grown
            self._counted += size
            self._limit()

    def drop(self, key: Key) -> None:
        """Drops the value of `key`, if it is kept."""
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        """Drops all values."""
        with self._lock:
            self._entries.clear()
            self._counted = 0

    def _limit(self) -> None:
        while self._counted > self.max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._counted -= entry[1]


def _renew_locks() -> None:
    """Called in a fork, which does not have the thread that would release a lock."""
    for kept in list(_caches):
        kept._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def cached_bytes() -> int:
    """The bytes of all values that caches of this process keep, as these count them."""
    return sum(kept.num_bytes for kept in list(_caches))


def byte_cached(max_bytes: int) -> Callable[[Callable[[Any], Value]], Callable[[Any], Value]]:
    """A decorator that caches the results of a function of one text, at most `max_bytes` of texts
    and textual results. Arguments that cannot be keys are not cached."""

    def decorate(function: Callable[[Any], Value]) -> Callable[[Any], Value]:
        results: ByteCache[Any, tuple[Value]] = ByteCache(max_bytes)

        @wraps(function)
        def cached(text: Any) -> Value:
            if not isinstance(text, (str, bytes)):
                return function(text)
            found = results.get(text)
            if found is None:
                found = (function(text),)
                results.put(text, found, text_bytes(text) + text_bytes(found[0]))
            return found[0]

        return cached

    return decorate


def text_bytes(value: object) -> int:
    """An upper bound of the memory of a text, or of a list or tuple of small values, in bytes."""
    if isinstance(value, str):
        return 4 * len(value)
    if isinstance(value, bytes):
        return len(value)
    return 64 * len(value) if isinstance(value, (list, tuple)) else 0


class _AllocatorReport(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def _allocator_report() -> Callable[[], _AllocatorReport] | None:
    """glibc's `mallinfo2`; None where the C library lacks it."""
    try:
        function: Any = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    function.restype = _AllocatorReport
    report: Callable[[], _AllocatorReport] = function
    return report


def allocated_bytes() -> int | None:
    """The bytes that the process has allocated through malloc; None where that is not known."""
    report = _allocator_report()
    if report is None:
        return None
    found = report()
    return int(found.uordblks) + int(found.hblkhd)


def resident_bytes() -> int:
    """The resident memory of the process, in bytes; 0 where it is not known."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(file, 256).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(file)


def measured_bytes(before: int | None, minimum: int) -> int:
    """The growth of `allocated_bytes()` since it was `before`, at least `minimum`. Other threads
    may have allocated and freed memory too, so it is an estimate."""
    now = allocated_bytes()
    return minimum if before is None or now is None else max(minimum, now - before)
