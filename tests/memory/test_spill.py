"""Storage for evicted blocks: which blocks are dropped, and what a restart finds."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from anydecode.errors import InvalidRequestError
from anydecode.memory import spill as spill_module
from anydecode.memory.spill import DiskSpill, MemorySpill

A, B, C, D = (bytes([number]) * 32 for number in range(4))
BLOCK = b"0123456789"
DAY = 86400


def stored(folder: Path, *keys: bytes, identity: str = "blocks") -> int:
    """Store a block under each of `keys`; returns the size of one file."""
    spill = DiskSpill(folder, 1 << 20, identity)
    for key in keys:
        spill.put(key, BLOCK)
    spill.close()
    return spill.num_bytes // len(keys)


def path_of(folder: Path, key: bytes, identity: str = "blocks") -> Path:
    return folder / identity / f"{key.hex()}.block"


def set_age(path: Path, seconds: float) -> None:
    """Set the time of last use."""
    last_used = path.stat().st_mtime - seconds
    os.utime(path, (last_used, last_used))


@pytest.mark.parametrize("is_put", [False, True])
def test_memory_drops_the_least_recently_used_block(is_put: bool) -> None:
    spill = MemorySpill(3 * len(BLOCK))
    for key in (A, B, C):
        spill.put(key, BLOCK)
    assert len(spill) == 3  # as many as the limit holds, to the byte
    if is_put:
        spill.put(A, BLOCK)
    else:
        assert spill.get(A) == BLOCK
    spill.put(D, BLOCK)
    assert [key in spill for key in (A, B, C, D)] == [True, False, True, True]
    assert [spill.get(key) for key in (A, B)] == [BLOCK, None]
    assert spill.num_bytes == 3 * len(BLOCK)


def test_memory_drops_a_block_that_is_larger_than_the_limit() -> None:
    spill = MemorySpill(len(BLOCK))
    spill.put(A, BLOCK)
    spill.put(B, BLOCK + b"x")
    assert (A in spill, B in spill, spill.num_bytes) == (True, False, len(BLOCK))
    spill.clear()
    assert (spill.get(A), len(spill), spill.num_bytes) == (None, 0, 0)


def test_a_disk_spill_drops_the_least_recently_used_block(tmp_path: Path) -> None:
    size = stored(tmp_path, A, B, C)
    for age, key in ((3, A), (2, B), (1, C)):
        set_age(path_of(tmp_path, key), age * DAY)
    spill = DiskSpill(tmp_path, 3 * size)
    assert spill.get(A) == BLOCK
    spill.put(D, BLOCK)
    spill.close()
    assert [key in spill for key in (A, B, C, D)] == [True, False, True, True]
    assert not path_of(tmp_path, B).exists()
    assert spill.num_bytes == 3 * size


def test_a_smaller_limit_keeps_the_blocks_used_last(tmp_path: Path) -> None:
    """The times of last use are stored with the files: keys and folders have another order."""
    size = stored(tmp_path, A, B, C, D)
    for age, key in ((1, C), (2, A), (3, D), (4, B)):
        set_age(path_of(tmp_path, key), age * DAY)
    spill = DiskSpill(tmp_path, 4 * size)
    assert spill.get(D) == BLOCK  # now the last one used
    spill.close()
    spill = DiskSpill(tmp_path, 2 * size)
    spill.close()
    assert [key in spill for key in (A, B, C, D)] == [False, False, True, True]
    assert {path for path in (tmp_path / "blocks").iterdir()} == {
        path_of(tmp_path, key) for key in (C, D)
    }
    assert spill.num_bytes == 2 * size


def test_a_corrupt_block_is_missing(tmp_path: Path) -> None:
    size = stored(tmp_path, A, B)
    path = path_of(tmp_path, A)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    path_of(tmp_path, C).write_bytes(path_of(tmp_path, B).read_bytes())  # the block of another key
    spill = DiskSpill(tmp_path, 1 << 20)
    assert [spill.get(key) for key in (A, B, C)] == [None, BLOCK, None]
    assert (len(spill), spill.num_bytes) == (1, size)
    assert not path.exists()
    spill.put(A, BLOCK)  # it may be stored again
    spill.close()
    assert spill.get(A) == BLOCK


def test_partial_files_of_ended_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stored(tmp_path, A)
    folder = tmp_path / "blocks"
    running = folder / f"{B.hex()}-{os.getpid()}.part"
    left = folder / f"{B.hex()}-{ended.pid}.part"
    for path in (running, left):
        path.touch()
    DiskSpill(tmp_path, 1 << 20).close()
    assert (running.exists(), left.exists()) == (sys.platform != "win32", False)
    # Windows cannot remove a file that is open, and a signal would end the process.
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal ends a process there"))
    DiskSpill(tmp_path, 1 << 20).close()
    assert not running.exists()


def test_folders_of_other_identities_are_removed_when_unused(tmp_path: Path) -> None:
    for identity, age in (("old", 31), ("young", 29), ("own", 31), ("foreign", 31)):
        stored(tmp_path, A, B, identity=identity)
        for key in (A, B):
            set_age(path_of(tmp_path, key, identity), age * DAY)
    mixed = path_of(tmp_path, A, "young")
    set_age(mixed, 10 * DAY)  # a folder is in use if one of its blocks is
    (tmp_path / "foreign" / "notes.txt").write_text("of a user")
    set_age(tmp_path / "foreign" / "notes.txt", 31 * DAY)
    DiskSpill(tmp_path, 1 << 20, "own", max_age_days=30).close()
    assert {path.name for path in tmp_path.iterdir()} == {"young", "own", "foreign"}


def test_blocks_are_written_while_the_spill_is_open(tmp_path: Path) -> None:
    """A process that is killed does not close it."""
    spill = DiskSpill(tmp_path, 1 << 20)
    try:
        for key in (A, B):
            spill.put(key, BLOCK)
            while not path_of(tmp_path, key).exists():  # until the limit of every test
                time.sleep(0.01)
    finally:
        spill.close()


def test_blocks_beyond_the_write_queue_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_module, "MAX_PENDING", 0)
    spill = DiskSpill(tmp_path, 1 << 20)
    spill.put(A, BLOCK)
    spill.close()
    assert A not in spill


def test_blocks_of_a_folder_that_can_only_be_read_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = DiskSpill(tmp_path, 1 << 20)
    spill.put(b"key", b"block")
    spill.close()

    def read_only(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.utime", read_only)
    spill = DiskSpill(tmp_path, 1 << 20)
    assert spill.get(b"key") == b"block"
    spill.close()


def test_a_file_system_that_became_read_only_loses_blocks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = DiskSpill(tmp_path, 1 << 20)

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(spill_module.os, "open", refuse)
        patch.setattr(Path, "unlink", refuse)
        spill.put(A, BLOCK)
        while A in spill and spill._writer.is_alive():  # until the limit of every test
            time.sleep(0.01)
        assert spill.get(A) is None
    spill.put(B, BLOCK)
    spill.close()
    assert spill.get(B) == BLOCK


def test_a_spill_needs_a_limit(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="0 bytes"):
        MemorySpill(0)
    with pytest.raises(InvalidRequestError, match="-1 bytes"):
        DiskSpill(tmp_path, -1)


def staged(spill: DiskSpill, *keys: bytes) -> list[bool]:
    """Which of `keys` were read ahead, once nothing is left to read."""
    for _ in range(2000):
        with spill._lock:
            if not spill._wanted:
                break
        time.sleep(0.005)
    return [key in spill._staged for key in keys]


def test_blocks_of_waiting_requests_are_read_ahead_and_then_dropped(tmp_path: Path) -> None:
    stored(tmp_path, A, B, C)
    spill = DiskSpill(tmp_path, 1 << 20)
    spill.expect([[A, D], [B, A], [C]], cached={C})
    assert staged(spill, A, B, C, D) == [True, True, False, False]
    path_of(tmp_path, A).unlink()
    assert spill.get(A) == BLOCK  # from memory
    spill.expect([[B]])  # the first request has started, or was cancelled
    assert staged(spill, A, B) == [False, True]
    spill.expect([])
    assert not spill._staged
    assert spill.get(C) == BLOCK
    spill.close()


def test_what_is_read_ahead_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = stored(tmp_path, A, B, C)
    monkeypatch.setattr(spill_module, "MAX_STAGED_BYTES", 2 * size)
    spill = DiskSpill(tmp_path, 1 << 20)
    spill.expect([[A], [B], [C]])
    assert staged(spill, A, B, C) == [True, True, False]
    spill.close()


def test_a_corrupt_block_is_not_read_ahead(tmp_path: Path) -> None:
    stored(tmp_path, A, B)
    path = path_of(tmp_path, A)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    spill = DiskSpill(tmp_path, 1 << 20)
    spill.expect([[A, B]])
    assert staged(spill, A, B) == [False, True]
    assert spill.get(A) is None and A not in spill and not path.exists()
    spill.close()


def test_a_block_that_is_being_read_is_not_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, A)
    read, num_reads = DiskSpill._read, []

    def slow(self: DiskSpill, key: bytes) -> bytes | None:
        num_reads.append(key)
        time.sleep(0.2)
        return read(self, key)

    monkeypatch.setattr(DiskSpill, "_read", slow)
    spill = DiskSpill(tmp_path, 1 << 20)
    spill.expect([[A]])
    while not num_reads:
        time.sleep(0.001)
    assert spill.get(A) == BLOCK and num_reads == [A]
    spill.close()


def test_a_spill_can_be_closed_while_it_reads(tmp_path: Path) -> None:
    stored(tmp_path, A, B, C, D)
    spill = DiskSpill(tmp_path, 1 << 20)
    spill.expect([[A, B, C, D]])
    spill.close()
    assert not any(thread.name == "anydecode-spill-reader" for thread in threading.enumerate())


def test_a_block_whose_reading_ahead_fails_is_read_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever needs it does not wait for the thread that has failed."""
    stored(tmp_path, A, B)
    spill, read, has_failed = DiskSpill(tmp_path, 1 << 20), DiskSpill._read, threading.Event()

    def failing(self: DiskSpill, key: bytes) -> bytes | None:
        if threading.current_thread().name == "anydecode-spill-reader" and key == A:
            has_failed.set()
            raise MemoryError
        return read(self, key)

    monkeypatch.setattr(DiskSpill, "_read", failing)
    spill.expect([[A, B]])
    assert has_failed.wait(60)
    found: list[bytes | None] = []
    needs = threading.Thread(target=lambda: found.extend(map(spill.get, (A, B))), daemon=True)
    needs.start()
    needs.join(20)
    assert found == [BLOCK, BLOCK]
    spill.close()


def test_without_a_thread_for_reading_ahead_blocks_are_read_when_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, A)
    spill = DiskSpill(tmp_path, 1 << 20)

    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    spill.expect([[A]])
    assert spill.get(A) == BLOCK
    spill.close()
