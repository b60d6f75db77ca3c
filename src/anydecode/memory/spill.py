"""Storage for evicted blocks of the prefix cache: main memory, or files.

A block's key is a digest of its tokens and all tokens before it, computed by `PrefixCache`. Files
are written under a temporary name and renamed, and contain a checksum: a crash leaves a complete
block or none, and a corrupt block is treated as missing. Blocks that waiting requests need are
dropped last, and are read from files before they are needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as Seq
from pathlib import Path

from anydecode.errors import InvalidRequestError

_MAGIC = b"anydecode block 1\n"
#: Maximum number of blocks in the write queue. Further blocks are dropped, so `put` never blocks.
MAX_PENDING = 256
#: Maximum size of the blocks that are read from files ahead of their use.
MAX_STAGED_BYTES = 256 << 20


class Spill(ABC):
    """Stores blocks of at most `limit` bytes in total. Of the blocks that no waiting request needs,
    the least recently used are dropped first; then those that the last waiting request needs.

    Raises:
        InvalidRequestError: `limit` is less than 1 byte.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise InvalidRequestError(
                f"the limit of a spill is {limit} bytes; allowed is 1 or more"
            )
        self.limit = limit
        self.num_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # in order of last use
        self._needed: dict[bytes, int] = {}  # by the first request of the queue that needs the key

    def expect(self, queue: Seq[Seq[bytes]], cached: Collection[bytes] = ()) -> None:
        """Note which blocks the waiting requests need.

        Args:
            queue: The keys of each request, the request that starts next first.
            cached: Those that need not be read, since the prefix cache has them.
        """
        self._needed = {
            key: position for position in reversed(range(len(queue))) for key in queue[position]
        }

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @abstractmethod
    def put(self, key: bytes, block: bytes) -> None:
        """Store `block`; one that is larger than the limit is dropped."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """The stored block; None if it is missing or corrupt."""

    @abstractmethod
    def clear(self) -> None:
        """Remove every block."""

    def close(self) -> None:  # noqa: B027  optional: most have nothing to finish
        """Finish pending writes."""

    def _track(self, key: bytes, size: int) -> list[bytes]:
        """Count a new block; returns the keys of the blocks to drop for it."""
        self._sizes[key] = size
        self.num_bytes += size
        evicted = []
        while self.num_bytes > self.limit:
            evicted.append(self._victim())
            self._untrack(evicted[-1])
        return evicted

    def _victim(self) -> bytes:
        """The key of the block to drop next."""
        last, found = -1, b""
        for key in self._sizes:
            position = self._needed.get(key)
            if position is None:
                return key
            if position > last:
                last, found = position, key
        return found

    def _untrack(self, key: bytes) -> None:
        self.num_bytes -= self._sizes.pop(key, 0)


class MemorySpill(Spill):
    """Blocks in main memory."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._blocks: dict[bytes, bytes] = {}

    def put(self, key: bytes, block: bytes) -> None:
        if key in self._sizes:
            self._sizes.move_to_end(key)
        elif len(block) <= self.limit:
            self._blocks[key] = block
            for evicted in self._track(key, len(block)):
                del self._blocks[evicted]

    def get(self, key: bytes) -> bytes | None:
        if key in self._sizes:
            self._sizes.move_to_end(key)
        return self._blocks.get(key)

    def clear(self) -> None:
        self._blocks.clear()
        self._sizes.clear()
        self.num_bytes = 0


class DiskSpill(Spill):
    """Stores blocks as files under `folder/identity`, readable by their owner only. Background
    threads write them, and read those that waiting requests need.

    Args:
        folder: The parent folder, shared by all identities.
        limit: The maximum size of this identity's blocks, in bytes.
        identity: A name of the model, build and format that compute the blocks. Blocks of other
            identities are never read.
        max_age_days: Folders of other identities that were not used for this many days are removed.

    Raises:
        InvalidRequestError: The folder cannot be written, or `limit` is less than 1 byte.
    """

    def __init__(
        self, folder: Path, limit: int, identity: str = "blocks", max_age_days: float = 30.0
    ) -> None:
        super().__init__(limit)
        self.folder = folder / identity
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._scan()
        except OSError as error:
            raise InvalidRequestError(
                f"the spill folder {folder} cannot be used: {error.strerror}"
            ) from None
        _remove_old(folder, self.folder, max_age_days)
        self._pending: OrderedDict[bytes, bytes] = OrderedDict()
        self._wanted: list[bytes] = []  # keys to read ahead, in this order
        self._staged: dict[bytes, bytes] = {}  # blocks that were read ahead
        self._reading: bytes | None = None
        self._reader: threading.Thread | None = None
        self._lock = threading.Condition()
        self._closed = False
        self._writer = threading.Thread(target=self._write_all, name="anydecode-spill", daemon=True)
        self._writer.start()

    def put(self, key: bytes, block: bytes) -> None:
        with self._lock:
            if key in self._sizes or key in self._pending:
                return
            if len(block) <= self.limit and len(self._pending) < MAX_PENDING and not self._closed:
                self._pending[key] = block
                self._lock.notify_all()

    def expect(self, queue: Seq[Seq[bytes]], cached: Collection[bytes] = ()) -> None:
        with self._lock:
            super().expect(queue, cached)
            wanted, left = [], MAX_STAGED_BYTES
            for key in dict.fromkeys(key for keys in queue for key in keys):
                if key in self._sizes and key not in cached:
                    left -= self._sizes[key]
                    if left < 0:
                        break
                    wanted.append(key)
            self._staged = {key: self._staged[key] for key in wanted if key in self._staged}
            self._wanted = [key for key in wanted if key not in self._staged]
            if self._wanted and self._reader is None and not self._closed:
                reader = threading.Thread(
                    target=self._read_all, name="anydecode-spill-reader", daemon=True
                )
                with contextlib.suppress(RuntimeError):  # no more threads: `get` reads the blocks
                    reader.start()
                    self._reader = reader
            self._lock.notify_all()

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            while self._reading == key:
                self._lock.wait()
            if key in self._sizes:
                self._sizes.move_to_end(key)
            for blocks in (self._pending, self._staged):
                if key in blocks:
                    return blocks[key]
            if key not in self._sizes:
                return None
            if key in self._wanted:
                self._wanted.remove(key)
        return self._read(key)

    def _read_all(self) -> None:
        while True:
            with self._lock:
                while not self._wanted and not self._closed:
                    self._lock.wait()
                if self._closed:
                    return
                key = self._reading = self._wanted[0]
            block = None
            with contextlib.suppress(Exception):  # `get` tries again and raises it
                block = self._read(key)
            with self._lock:
                self._reading = None
                if key in self._wanted:
                    self._wanted.remove(key)
                    if block is not None:
                        self._staged[key] = block
                self._lock.notify_all()

    def _read(self, key: bytes) -> bytes | None:
        """The block of a file; a file that is missing or corrupt is forgotten."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            data = b""
        with contextlib.suppress(OSError):  # a folder that can only be read
            os.utime(path)
        head = len(_MAGIC) + 32
        block = data[head:]
        if data[:head] == _MAGIC + hashlib.sha256(key + block).digest():
            return block
        with self._lock:
            self._untrack(key)
        _remove(path)
        return None

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes or key in self._pending

    def clear(self) -> None:
        with self._lock:
            self._pending.clear()
            self._wanted.clear()
            self._staged.clear()
            for key in self._sizes:
                _remove(self._path(key))
            self._sizes.clear()
            self.num_bytes = 0

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._writer.join()
        if self._reader is not None:
            self._reader.join()

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.block"

    def _part(self, key: bytes) -> Path:
        """The file into which a block is written before it is renamed."""
        return self.folder / f"{key.hex()}-{os.getpid()}.part"

    def _scan(self) -> None:
        """Count the blocks of earlier processes; partially written files are removed."""
        blocks = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError, ValueError):
                if path.suffix == ".block":
                    status = path.stat()
                    blocks.append((status.st_mtime, bytes.fromhex(path.stem), status.st_size))
                elif path.suffix == ".part" and not _is_alive(int(path.stem.rpartition("-")[2])):
                    path.unlink()
        for _, key, size in sorted(blocks):
            for evicted in self._track(key, size):
                _remove(self._path(evicted))

    def _write_all(self) -> None:
        while True:
            with self._lock:
                while not self._pending and not self._closed:
                    self._lock.wait()
                if not self._pending:
                    return
                key, block = next(iter(self._pending.items()))
            num_written = self._write(key, block)
            with self._lock:
                is_pending = self._pending.pop(key, None) is not None
                removed = self._track(key, num_written) if num_written and is_pending else [key]
            for old in removed:
                _remove(self._path(old))

    def _write(self, key: bytes, block: bytes) -> int:
        """Write a block; returns the number of bytes written, 0 if writing failed."""
        part = self._part(key)
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(key + block).digest())
                file.write(block)
            part.replace(self._path(key))
        except OSError:
            _remove(part)
            return 0
        return len(_MAGIC) + 32 + len(block)


def _remove(path: Path) -> None:
    """Remove a file, if it exists and the file system can be written."""
    with contextlib.suppress(OSError):
        path.unlink()


def _is_alive(process: int) -> bool:
    if sys.platform == "win32":  # a signal would end it, and an open file cannot be removed
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove_old(folder: Path, current: Path, max_age_days: float) -> None:
    """Remove the folders of other identities whose blocks were not used for so long."""
    import time

    oldest = time.time() - max_age_days * 86400
    for other in folder.iterdir():
        if other == current or not other.is_dir():
            continue
        names = list(other.iterdir())
        has_only_blocks = names and all(path.suffix in (".block", ".part") for path in names)
        if has_only_blocks and all(path.stat().st_mtime < oldest for path in names):
            shutil.rmtree(other, ignore_errors=True)
