"""Caches bounded by bytes, so that large entries cannot fill the memory."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache, wraps
from typing import Any, Generic, TypeVar
from weakref import WeakSet, ref

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
#: Bytes counted for every entry beside its size: the key, the links and the counters.
ENTRY_BYTES = 512
#: A `GrowingByteCache` drops one of so many new values after as many others, to measure its growth
#: (which takes up to some milliseconds); and the growth is that of about so many values.
_SAMPLE_INTERVAL, _NUM_SAMPLES = 8, 64


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
        """Drops old values until the newest and the others are within the limit."""
        while self.num_bytes > self.max_bytes and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._counted -= entry[1]


class GrowingByteCache(ByteCache[Key, Value]):
    """A `ByteCache` of values whose memory grows while they are used.

    The memory of a value is known again only when it is freed, so the sizes of all values are
    multiplied by the growth of those that were freed last. For this, some new values are dropped
    before the cache is full. A value that is still referenced elsewhere when it is dropped is not
    measured. Values must allow weak references.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._num_put = 0
        self._sample: Key | None = None
        #: The sizes of the values that were freed, as counted and as measured, in bytes. Each value
        #: weighs less than the next one.
        self._freed_counted = self._freed_measured = 0.0

    @property
    def growth(self) -> float:
        """The ratio of the sizes of values after use to their sizes when new; 1 or more."""
        return max(1.0, self._freed_measured / self._freed_counted) if self._freed_counted else 1.0

    @property
    def num_bytes(self) -> int:
        return int(self._counted * self.growth)

    def _limit(self) -> None:
        if self._num_put % _SAMPLE_INTERVAL == 0:
            newest = next(reversed(self._entries))
            if self._sample is not None and self._sample != newest:
                self._measure(self._sample)
            self._sample = newest
            if self.num_bytes > self.max_bytes and len(self._entries) > 1:
                self._measure(next(iter(self._entries)))  # longest in use
        self._num_put += 1
        super()._limit()

    def _measure(self, key: Key) -> None:
        """Drops the value of `key`, if it is kept, and measures what that frees."""
        entry = self._entries.get(key)
        if entry is None:
            return
        value, size = entry
        reference, before = ref(value), allocated_bytes()
        del entry, value
        self._drop(key)
        after = allocated_bytes()
        if reference() is None and before is not None and after is not None:
            weight = 1 - 1 / _NUM_SAMPLES
            self._freed_counted = weight * self._freed_counted + size
            freed = min(max(0, before - after), self.max_bytes)  # other threads free memory too
            self._freed_measured = weight * self._freed_measured + freed


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


def measured_bytes(before: int | None, minimum: int) -> int:
    """The growth of `allocated_bytes()` since it was `before`, at least `minimum`. Other threads
    may have allocated and freed memory too, so it is an estimate."""
    now = allocated_bytes()
    return minimum if before is None or now is None else max(minimum, now - before)
