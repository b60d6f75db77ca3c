"""Where blocks of the prefix cache go when their slots are taken: main memory, or files.

A block is found by a digest of everything before it (`PrefixCache` makes it). Files are written
beside and renamed, and carry a checksum, so that a crash leaves a whole block or none, and a block
that was damaged is one that is not there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from anydecode.errors import InvalidRequestError

_MAGIC = b"anydecode block 1\n"
#: Blocks that wait to be written; what comes while so many wait is dropped, for nobody is to wait.
MOST_PENDING = 256


class Spill(ABC):
    """At most `limit` bytes of blocks; those used longest ago are dropped first."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise InvalidRequestError("a spill needs a limit of 1 byte or more")
        self.limit = limit
        self.num_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # the one used last stands last

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @abstractmethod
    def put(self, key: bytes, block: bytes) -> None:
        """Keep `block`; one that is larger than the limit is not kept."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """The block, as it was put; None where there is none that is whole."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every block."""

    def close(self) -> None:  # noqa: B027  most have nothing to finish
        """Finish what is being written."""

    def _enter(self, key: bytes, size: int) -> list[bytes]:
        """Count a new block; returns the keys that have to go for it."""
        self._sizes[key] = size
        self.num_bytes += size
        gone = []
        while self.num_bytes > self.limit:
            oldest = next(iter(self._sizes))
            self._leave(oldest)
            gone.append(oldest)
        return gone

    def _leave(self, key: bytes) -> None:
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
            for gone in self._enter(key, len(block)):
                del self._blocks[gone]

    def get(self, key: bytes) -> bytes | None:
        if key in self._sizes:
            self._sizes.move_to_end(key)
        return self._blocks.get(key)

    def clear(self) -> None:
        self._blocks.clear()
        self._sizes.clear()
        self.num_bytes = 0


class DiskSpill(Spill):
    """Blocks in files under `folder/identity`, readable by their owner only. A thread writes them.

    `identity` names what computed the blocks: what another model, build or format has written is
    never read. The limit is this identity's; folders of others that nobody has used for `keep_days`
    are removed.
    """

    def __init__(
        self, folder: Path, limit: int, identity: str = "blocks", keep_days: float = 30.0
    ) -> None:
        super().__init__(limit)
        self.folder = folder / identity
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._scan()
        except OSError as error:
            raise InvalidRequestError(f"{folder} cannot be used: {error.strerror}") from None
        _remove_old(folder, self.folder, keep_days)
        self._pending: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Condition()
        self._closed = False
        self._writer = threading.Thread(target=self._write_all, name="anydecode-spill", daemon=True)
        self._writer.start()

    def put(self, key: bytes, block: bytes) -> None:
        with self._lock:
            if key in self._sizes or key in self._pending:
                return
            if len(block) <= self.limit and len(self._pending) < MOST_PENDING and not self._closed:
                self._pending[key] = block
                self._lock.notify_all()

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            if key in self._pending:
                return self._pending[key]
            if key not in self._sizes:
                return None
            self._sizes.move_to_end(key)
        path = self._path(key)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            data = b""
        head = len(_MAGIC) + 32
        block = data[head:]
        if data[:head] == _MAGIC + hashlib.sha256(key + block).digest():
            return block
        with self._lock:
            self._leave(key)
        path.unlink(missing_ok=True)
        return None

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes or key in self._pending

    def clear(self) -> None:
        with self._lock:
            self._pending.clear()
            for key in self._sizes:
                self._path(key).unlink(missing_ok=True)
            self._sizes.clear()
            self.num_bytes = 0

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._writer.join()

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.block"

    def _scan(self) -> None:
        """Take stock of what an earlier process left; half-written files are removed."""
        found = []
        for path in self.folder.iterdir():
            with suppress(OSError, ValueError):
                if path.suffix == ".block":
                    status = path.stat()
                    found.append((status.st_mtime, bytes.fromhex(path.stem), status.st_size))
                elif path.suffix == ".part" and not _alive(int(path.stem.rpartition("-")[2])):
                    path.unlink()
        for _, key, size in sorted(found):
            for gone in self._enter(key, size):
                self._path(gone).unlink(missing_ok=True)

    def _write_all(self) -> None:
        while True:
            with self._lock:
                while not self._pending and not self._closed:
                    self._lock.wait()
                if not self._pending:
                    return
                key, block = next(iter(self._pending.items()))
            written = self._write(key, block)
            with self._lock:
                wanted = self._pending.pop(key, None) is not None
                gone = self._enter(key, written) if written and wanted else [key]
            for old in gone:
                self._path(old).unlink(missing_ok=True)

    def _write(self, key: bytes, block: bytes) -> int:
        """Bytes written; 0 where the disk would not have them."""
        part = self.folder / f"{key.hex()}-{os.getpid()}.part"
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(key + block).digest())
                file.write(block)
            part.replace(self._path(key))
        except OSError:
            part.unlink(missing_ok=True)
            return 0
        return len(_MAGIC) + 32 + len(block)


def _alive(process: int) -> bool:
    if sys.platform == "win32":  # where a signal would end it, and an open file cannot be removed
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove_old(folder: Path, own: Path, days: float) -> None:
    """Remove other identities' folders of blocks that nobody has used for so long."""
    import time

    oldest = time.time() - days * 86400
    for other in folder.iterdir():
        if other == own or not other.is_dir():
            continue
        names = list(other.iterdir())
        ours = names and all(path.suffix in (".block", ".part") for path in names)
        if ours and all(path.stat().st_mtime < oldest for path in names):
            shutil.rmtree(other, ignore_errors=True)
