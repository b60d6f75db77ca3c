"""Stored responses: a SQLite database, in memory or in a file, bounded by bytes and age."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from anydecode.errors import InvalidRequestError

#: Marks a file as such a database (`PRAGMA application_id`), and the version of its tables.
_APPLICATION_ID, _VERSION = 0x616E7944, 1
#: Bytes that a response is counted with, besides its texts.
_OVERHEAD = 1024
#: The statuses of responses that are being generated.
RUNNING = ("queued", "in_progress")
#: The error of a response whose server ended before it.
INTERRUPTED = {
    "code": "server_error",
    "message": "the server stopped while it generated this response; send the request again",
}
_TABLES = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, is_running INTEGER NOT NULL,
    size INTEGER NOT NULL, response TEXT NOT NULL, input TEXT NOT NULL, events BLOB NOT NULL);
CREATE INDEX by_age ON responses (tenant, is_running, created);
CREATE TABLE items (
    id TEXT NOT NULL, response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
    PRIMARY KEY (id, response)) WITHOUT ROWID;
CREATE INDEX by_response ON items (response);
"""
Item = dict[str, Any]
_Result = TypeVar("_Result")


class ResponseStore:
    """The responses that a server has stored, each readable with the API key that created it.

    If their texts exceed `max_bytes`, the oldest responses of the key that stores the most are
    removed. Responses that are being generated are not removed. All methods but the constructor run
    on a thread of the store.

    Args:
        where: A file, which is created if it is missing, or "memory".
        max_bytes: Maximum size of the stored texts, in bytes.
        max_seconds: Maximum age of a response, in seconds.

    Raises:
        InvalidRequestError: The file cannot be used.
    """

    def __init__(self, where: str, max_bytes: int, max_seconds: float) -> None:
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        try:
            self._database = _open(where)
            self._fail_interrupted()
            self._sizes = self._read_sizes()
        except (sqlite3.Error, OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidRequestError(
                f"--store {where}: {reason}; give a file that one server of anydecode writes,"
                " 'memory' or 'none'"
            ) from None
        self._executor = ThreadPoolExecutor(1, "anydecode-store")

    async def put(
        self, tenant: str | None, response: dict[str, Any], items: list[Item], events: list[bytes]
    ) -> bool:
        """Store or replace a response. Returns False if it is larger than the store.

        Args:
            tenant: The namespace of the API key; None without keys.
            response: The response object.
            items: The input items that it answers, with those of earlier responses.
            events: The events of its stream that can be read again.
        """

        def put() -> bool:
            texts = (json.dumps(response), json.dumps(items), zlib.compress(b"".join(events)))
            size = _OVERHEAD + sum(map(len, texts))
            if size > self._max_bytes:
                return False
            identity, status = response["id"], response["status"]
            with self._transaction():
                self._remove("id = ?", identity)
                self._database.execute(
                    "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (identity, tenant or "", response["created_at"], status in RUNNING, size)
                    + texts,
                )
                self._database.executemany(
                    "INSERT OR IGNORE INTO items VALUES (?, ?)",
                    [(item["id"], identity) for item in (*items, *response["output"])],
                )
                self._sizes[tenant or ""] += size
                self._remove("NOT is_running AND created < ?", self._oldest_time())
                while self._sizes.total() > self._max_bytes and self._remove_oldest(identity):
                    pass
            return True

        return await self._run(put)

    async def response(self, tenant: str | None, identity: str) -> dict[str, Any] | None:
        """A stored response; None if this tenant has none of this id."""
        row = await self._row("response", tenant, identity)
        return None if row is None else json.loads(row[0])

    async def input_items(self, tenant: str | None, identity: str) -> list[Item] | None:
        """The input items of a stored response."""
        row = await self._row("input", tenant, identity)
        return None if row is None else json.loads(row[0])

    async def conversation(
        self, tenant: str | None, identity: str
    ) -> tuple[dict[str, Any], list[Item]] | None:
        """A stored response, and its input items."""
        row = await self._row("response, input", tenant, identity)
        return None if row is None else (json.loads(row[0]), json.loads(row[1]))

    async def events(self, tenant: str | None, identity: str) -> list[bytes]:
        """The events of the stream of a stored response; empty if they were not stored."""
        row = await self._row("events", tenant, identity)
        text = b"" if row is None else zlib.decompress(row[0])
        return [event + b"\n\n" for event in text.split(b"\n\n")[:-1]]

    async def items(self, tenant: str | None, identities: list[str]) -> dict[str, Item]:
        """The stored items of `identities`, by id; incomplete if one of them is missing."""

        def find() -> dict[str, Item]:
            wanted = set(identities)
            found: dict[str, Item] = {}
            for identity in identities:
                if identity in found:
                    continue
                row = self._database.execute(
                    "SELECT responses.response, input FROM items JOIN responses"
                    " ON responses.id = items.response"
                    " WHERE items.id = ? AND tenant = ? AND created >= ? LIMIT 1",
                    (identity, tenant or "", self._oldest_time()),
                ).fetchone()
                if row is None:
                    break  # one is missing: the others are not needed
                for item in (*json.loads(row[0])["output"], *json.loads(row[1])):
                    if item["id"] in wanted:
                        found[item["id"]] = item
            return found

        return await self._run(find)

    async def delete(self, tenant: str | None, identity: str) -> bool:
        """Remove a response. Returns whether there was one."""

        def delete() -> bool:
            with self._transaction():
                return bool(self._remove("id = ? AND tenant = ?", identity, tenant or ""))

        return await self._run(delete)

    def close(self) -> None:
        """Finish the pending writes and close the database."""
        self._executor.submit(self._database.close)
        self._executor.shutdown()

    async def _run(self, function: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def _row(self, columns: str, tenant: str | None, identity: str) -> Any:
        def read() -> Any:
            return self._database.execute(
                f"SELECT {columns} FROM responses WHERE id = ? AND tenant = ? AND created >= ?",
                (identity, tenant or "", self._oldest_time()),
            ).fetchone()

        return await self._run(read)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with self._database:
                yield
        except BaseException:
            self._sizes = self._read_sizes()
            raise

    def _read_sizes(self) -> Counter[str]:
        rows = self._database.execute("SELECT tenant, SUM(size) FROM responses GROUP BY tenant")
        return Counter(dict(rows.fetchall()))

    def _oldest_time(self) -> float:
        return time.time() - self._max_seconds

    def _remove(self, condition: str, *values: object) -> int:
        """Remove the responses that satisfy `condition`. Returns their number."""
        rows = self._database.execute(
            f"SELECT id, tenant, size FROM responses WHERE {condition}", values
        ).fetchall()
        for identity, tenant, size in rows:
            self._database.execute("DELETE FROM responses WHERE id = ?", (identity,))
            self._sizes[tenant] -= size
        return len(rows)

    def _remove_oldest(self, kept: str) -> int:
        """Remove the oldest response, but not `kept`, of the tenant that stores the most."""
        for tenant, _ in self._sizes.most_common():
            oldest = (
                "id = (SELECT id FROM responses WHERE tenant = ? AND NOT is_running AND id != ?"
                " ORDER BY created LIMIT 1)"
            )
            if removed := self._remove(oldest, tenant, kept):
                return removed
        return 0

    def _fail_interrupted(self) -> None:
        """Mark the responses that another process was generating as failed."""
        with self._database:
            rows = self._database.execute(
                "SELECT id, response FROM responses WHERE is_running"
            ).fetchall()
            for identity, text in rows:
                failed = {**json.loads(text), "status": "failed", "error": INTERRUPTED}
                self._database.execute(
                    "UPDATE responses SET is_running = 0, response = ? WHERE id = ?",
                    (json.dumps(failed), identity),
                )


def _open(where: str) -> sqlite3.Connection:
    """The database of `where`, with its tables, locked for other processes."""
    if where == "memory":
        where = ":memory:"
    else:
        # Readable by its owner only. SQLite gives its journal the same mode.
        os.close(os.open(where, os.O_RDWR | os.O_CREAT, 0o600))
    database = sqlite3.connect(where, timeout=0, check_same_thread=False)
    try:
        _prepare(database)
    except BaseException:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection) -> None:
    """Lock a database and create its tables. Raises `ValueError` if it is another program's."""
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA foreign_keys = ON")
    database.execute("PRAGMA secure_delete = ON")  # removed texts are overwritten
    database.execute("PRAGMA synchronous = NORMAL")
    is_empty = not database.execute("PRAGMA schema_version").fetchone()[0]
    [application] = database.execute("PRAGMA application_id").fetchone()
    [version] = database.execute("PRAGMA user_version").fetchone()
    if not is_empty and (application, version) != (_APPLICATION_ID, _VERSION):
        raise ValueError("it is a database of another program or version")
    if is_empty:
        database.execute("PRAGMA auto_vacuum = FULL")
    database.execute("PRAGMA journal_mode = WAL")  # commits do not wait for the disk
    if is_empty:
        database.executescript(
            f"BEGIN EXCLUSIVE; {_TABLES} PRAGMA application_id = {_APPLICATION_ID};"
            f" PRAGMA user_version = {_VERSION}; COMMIT;"
        )
