"""Stored files and batches: files are kept line by line, so that the result of every line of a
batch is stored when it is known."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from anydecode.server.database import Database, TenantRows

#: Bytes that a file or a batch is counted with, besides its texts.
_OVERHEAD = 1024
#: Bytes that a line of a file is counted with, besides its text.
_LINE_OVERHEAD = 64
#: Maximum size of the stored batch objects, in bytes.
_MAX_BATCH_BYTES = 16 << 20
#: Lines are read from files in parts of about this size, in bytes.
_PART = 1 << 18
#: The statuses of batches that have not ended.
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")

Object = dict[str, Any]
#: A line of a file with its number, which starts at 1.
Line = tuple[int, bytes]


class StorageFullError(Exception):
    """There is no room for a file, or for the result of a line."""


class TooManyBatchesError(Exception):
    """A tenant has as many batches that have not ended as it may have."""


@dataclass
class StoredBatch:
    """A batch that has not ended.

    Attributes:
        tenant: The namespace of the API key; None without keys.
        batch: The batch object.
        input: The id of the file with the requests.
        output: The id of the file with the answers.
        errors: The id of the file with the errors.
        expires: The time at which it expires.
    """

    tenant: str | None
    batch: Object
    input: str
    output: str
    errors: str
    expires: float


class BatchStore:
    """The files and batches of a server, each readable with the API key that created it.

    If the files exceed `max_bytes`, the oldest files of the key that stores the most are removed,
    but none that a batch uses that has not ended. All methods but the constructor run on the thread
    of the database.

    Args:
        database: The database.
        max_bytes: Maximum size of the files, in bytes.
        max_seconds: Maximum age of files, and of batches that have ended, in seconds.

    Raises:
        InvalidRequestError: The file of the database cannot be used.
    """

    def __init__(self, database: Database, max_bytes: int, max_seconds: float) -> None:
        self._database = database
        self._max_seconds = max_seconds
        self._files, self._batches = database.checked(
            lambda: (
                TenantRows(
                    database,
                    "files",
                    max_bytes,
                    "NOT is_running AND id NOT IN (SELECT input FROM batches WHERE is_running)",
                ),
                TenantRows(database, "batches", _MAX_BATCH_BYTES, "NOT is_running"),
            )
        )
        database.checked(self._unfinished)

    async def put_file(
        self, tenant: str | None, name: str, content: Iterable[bytes], max_seconds: float | None
    ) -> Object:
        """Store the lines of an uploaded file, with their ends. Returns its object.

        Args:
            tenant: The namespace of the API key; None without keys.
            name: The name of the file.
            content: Its lines.
            max_seconds: Its maximum age, if it is less than that of all files.

        Raises:
            StorageFullError: The file is too large, or all room is taken by files in use.
        """

        def put() -> Object:
            identity = f"file-{uuid4().hex}"
            with self._database.transaction():
                self._remove_expired()
                self._insert_file(tenant, identity, max_seconds)
                num_bytes = self._insert_lines(
                    tenant, identity, ((number, line) for number, line in enumerate(content, 1))
                )
                self._check_room(identity)
                return self._complete_file(identity, name, "batch", num_bytes)

        return await self._database.run(put)

    async def file(self, tenant: str | None, identity: str) -> Object | None:
        """The object of a file; None if this tenant has none of this id."""
        return await self._database.run(lambda: self._object("file", tenant, identity))

    async def files(
        self, tenant: str | None, after: str | None, limit: int, *, order: str, purpose: str | None
    ) -> tuple[list[Object], bool] | None:
        """A page of the files, and whether there are more of them; None if there is no file
        `after`."""

        def is_listed(one: Object) -> bool:
            return purpose is None or one["purpose"] == purpose

        return await self._database.run(
            lambda: self._page("file", tenant, after, limit, order, is_listed)
        )

    async def delete_file(self, tenant: str | None, identity: str) -> bool | None:
        """Remove a file. Returns whether there was one; None if a batch uses it that has not
        ended."""

        def delete() -> bool | None:
            if self._object("file", tenant, identity) is None:
                return False
            with self._database.transaction():
                return bool(self._files.remove_aged("id = ?", identity)) or None

        return await self._database.run(delete)

    async def lines(self, identity: str, after: int, num_bytes: int = _PART) -> list[Line]:
        """The lines of a file after number `after`, of about `num_bytes` bytes; empty at its
        end."""

        def read() -> list[Line]:
            found, size = [], 0
            rows = self._database.connection.execute(
                "SELECT number, content FROM lines WHERE file = ? AND number > ? ORDER BY number",
                (identity, after),
            )
            for number, content in rows:
                found.append((number, content))
                size += len(content)
                if size >= num_bytes:
                    break
            rows.close()
            return found

        return await self._database.run(read)

    async def put_batch(
        self,
        tenant: str | None,
        batch: Object,
        expires: float,
        max_seconds: float | None,
        max_batches: int,
    ) -> StoredBatch | None:
        """Store a new batch, which uses the file `batch["input_file_id"]`; None if this tenant has
        no such file.

        Args:
            tenant: The namespace of the API key; None without keys.
            batch: The batch object.
            expires: The time at which the batch expires.
            max_seconds: The maximum age of its output files, if it is less than that of all files.
            max_batches: Maximum number of batches of the tenant that have not ended.

        Raises:
            TooManyBatchesError: It has `max_batches` already.
            StorageFullError: All room is taken by files in use.
        """
        stored = StoredBatch(
            tenant,
            batch,
            batch["input_file_id"],
            f"file-{uuid4().hex}",
            f"file-{uuid4().hex}",
            expires,
        )

        def put() -> StoredBatch | None:
            text = json.dumps(batch)
            size = _OVERHEAD + len(text)
            if self._object("file", tenant, stored.input) is None:
                return None
            [num_running] = self._database.connection.execute(
                "SELECT COUNT(*) FROM batches WHERE tenant = ? AND is_running", (tenant or "",)
            ).fetchone()
            if num_running >= max_batches:
                raise TooManyBatchesError
            with self._database.transaction():
                self._remove_expired()
                self._database.connection.execute(
                    "INSERT INTO batches VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?, ?)",
                    (batch["id"], tenant or "", time.time(), expires, size, text)
                    + (stored.input, stored.output, stored.errors),
                )
                self._batches.sizes[tenant or ""] += size
                self._batches.make_room(batch["id"])
                for identity in (stored.output, stored.errors):
                    self._insert_file(tenant, identity, max_seconds)
                self._check_room(stored.errors)
            return stored

        return await self._database.run(put)

    async def batch(self, tenant: str | None, identity: str) -> Object | None:
        """The object of a batch as it was last stored; None if this tenant has none of this id."""
        return await self._database.run(lambda: self._object("batch", tenant, identity))

    async def batches(
        self, tenant: str | None, after: str | None, limit: int
    ) -> tuple[list[Object], bool] | None:
        """A page of the batches, the newest first, as `files`."""
        return await self._database.run(
            lambda: self._page("batch", tenant, after, limit, "desc", lambda one: True)
        )

    async def unfinished(self) -> list[StoredBatch]:
        """The batches that have not ended, in the order of their creation."""

        return await self._database.run(self._unfinished)

    async def start(self, stored: StoredBatch, failed: list[Line]) -> None:
        """Store a batch that has been validated, with the results of the lines that failed.

        Raises:
            StorageFullError: There is no room for the results.
        """

        def start() -> None:
            with self._database.transaction():
                self._insert_lines(stored.tenant, stored.errors, failed)
                self._check_room(stored.errors)
                self._update(stored.tenant, stored.batch)

        await self._database.run(start)

    async def update(self, stored: StoredBatch) -> None:
        """Store the batch object of a batch that has not ended."""

        def update() -> None:
            with self._database.transaction():
                self._update(stored.tenant, stored.batch)

        await self._database.run(update)

    async def add(self, stored: StoredBatch, number: int, result: bytes, is_error: bool) -> None:
        """Store the result of a line. Raises `StorageFullError` if there is no room for it."""

        def add() -> None:
            with self._database.transaction():
                file = stored.errors if is_error else stored.output
                self._insert_lines(stored.tenant, file, [(number, result)])
                self._check_room(file)

        await self._database.run(add)

    async def progress(self, stored: StoredBatch) -> tuple[list[int], int, int]:
        """The numbers of the lines without a result, and the numbers of answers and of errors."""

        def read() -> tuple[list[int], int, int]:
            missing = [number for number, _ in self._missing(stored)]
            return missing, self._count(stored.output), self._count(stored.errors)

        return await self._database.run(read)

    async def finish(
        self, stored: StoredBatch, result: Callable[[bytes], bytes] | None, fields: Object
    ) -> None:
        """Store a batch that has ended, and make its files readable.

        Args:
            stored: The batch.
            result: Makes the result of a line that was not run; None: it has none.
            fields: New fields of the batch object.

        Raises:
            StorageFullError: There is no room for the results.
        """

        def finish() -> None:
            batch = {**stored.batch, **fields}
            with self._database.transaction():
                if result is not None:
                    missing = list(self._missing(stored))  # before lines are inserted
                    self._insert_lines(
                        stored.tenant,
                        stored.errors,
                        ((number, result(text)) for number, text in missing),
                    )
                    self._check_room(stored.errors)
                ends = (("output", stored.output), ("error", stored.errors))
                num_answers, num_errors = [
                    self._finish_file(batch, name, identity) for name, identity in ends
                ]
                total = max(batch["request_counts"]["total"], num_answers + num_errors)
                counts = {"total": total, "completed": num_answers, "failed": num_errors}
                batch["request_counts"] = counts
                self._update(stored.tenant, batch)
                self._database.connection.execute(
                    "UPDATE batches SET is_running = 0, expires = ? WHERE id = ?",
                    (time.time() + self._max_seconds, batch["id"]),
                )
            stored.batch = batch

        await self._database.run(finish)

    def _unfinished(self) -> list[StoredBatch]:
        rows = self._database.connection.execute(
            "SELECT tenant, batch, input, output, errors, expires FROM batches"
            " WHERE is_running ORDER BY rowid"
        )
        found = [
            StoredBatch(tenant or None, json.loads(batch), *others)
            for tenant, batch, *others in rows.fetchall()
        ]
        if not all(isinstance(one.batch, dict) and "id" in one.batch for one in found):
            raise ValueError("a batch in it cannot be read")
        return found

    def _insert_file(self, tenant: str | None, identity: str, max_seconds: float | None) -> None:
        seconds = self._max_seconds if max_seconds is None else min(max_seconds, self._max_seconds)
        now = time.time()
        self._database.connection.execute(
            "INSERT INTO files VALUES (?, ?, ?, ?, 1, ?, '')",
            (identity, tenant or "", now, now + seconds, _OVERHEAD),
        )
        self._files.sizes[tenant or ""] += _OVERHEAD

    def _insert_lines(self, tenant: str | None, identity: str, lines: Iterable[Line]) -> int:
        """Add lines to a file. Returns the number of their bytes."""
        num_bytes = size = 0
        limit = self._files.max_bytes
        for number, content in lines:
            num_bytes += len(content)
            size += len(content) + _LINE_OVERHEAD
            if size > limit:
                raise StorageFullError
            self._database.connection.execute(
                "INSERT INTO lines VALUES (?, ?, ?)", (identity, number, content)
            )
        self._database.connection.execute(
            "UPDATE files SET size = size + ? WHERE id = ?", (size, identity)
        )
        self._files.sizes[tenant or ""] += size
        return num_bytes

    def _complete_file(self, identity: str, name: str, purpose: str, num_bytes: int) -> Object:
        """Make a file readable; its age counts from now on. Returns its object."""
        [seconds] = self._database.connection.execute(
            "SELECT expires - created FROM files WHERE id = ?", (identity,)
        ).fetchone()
        created = time.time()
        file = {
            "id": identity,
            "object": "file",
            "bytes": num_bytes,
            "created_at": int(created),
            "expires_at": int(created + seconds),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        self._database.connection.execute(
            "UPDATE files SET is_running = 0, created = ?, expires = ?, file = ? WHERE id = ?",
            (created, created + seconds, json.dumps(file), identity),
        )
        return file

    def _finish_file(self, batch: Object, name: str, identity: str) -> int:
        """Make an output file of a batch readable, or remove it if it is empty. Returns the number
        of its lines."""
        num_lines, num_bytes = self._database.connection.execute(
            "SELECT COUNT(*), SUM(length(content)) FROM lines WHERE file = ?", (identity,)
        ).fetchone()
        if num_lines:
            file_name = f"{batch['id']}_{name}.jsonl"
            self._complete_file(identity, file_name, "batch_output", num_bytes)
            batch[f"{name}_file_id"] = identity
        else:
            self._files.remove("id = ?", identity)
        return int(num_lines)

    def _check_room(self, kept: str) -> None:
        self._files.make_room(kept)
        if self._files.is_full:
            raise StorageFullError

    def _remove_expired(self) -> None:
        self._files.remove_aged("expires < ?", time.time())
        self._batches.remove_aged("expires < ?", time.time())

    def _update(self, tenant: str | None, batch: Object) -> None:
        identity, text = batch["id"], json.dumps(batch)
        size = _OVERHEAD + len(text)
        [before] = self._database.connection.execute(
            "SELECT size FROM batches WHERE id = ?", (identity,)
        ).fetchone()
        self._database.connection.execute(
            "UPDATE batches SET batch = ?, size = ? WHERE id = ?", (text, size, identity)
        )
        self._batches.sizes[tenant or ""] += size - before
        self._batches.make_room(identity)

    def _object(self, kind: str, tenant: str | None, identity: str) -> Object | None:
        row = self._database.connection.execute(
            f"SELECT {kind} FROM {_TABLES[kind]} WHERE id = ? AND {_IS_VISIBLE[kind]}",
            (identity, tenant or "", time.time()),
        ).fetchone()
        return None if row is None else json.loads(row[0])

    def _page(
        self,
        kind: str,
        tenant: str | None,
        after: str | None,
        limit: int,
        order: str,
        is_listed: Callable[[Object], bool],
    ) -> tuple[list[Object], bool] | None:
        table, connection = _TABLES[kind], self._database.connection
        condition, values = _IS_VISIBLE[kind], [tenant or "", time.time()]
        if after is not None:
            row = connection.execute(
                f"SELECT rowid FROM {table} WHERE id = ? AND {condition}", (after, *values)
            ).fetchone()
            if row is None:
                return None
            condition += " AND rowid < ?" if order == "desc" else " AND rowid > ?"
            values.append(row[0])
        rows = connection.execute(
            f"SELECT {kind} FROM {table} WHERE {condition} ORDER BY rowid {order}", values
        )
        found: list[Object] = []
        for (text,) in rows:
            if is_listed(one := json.loads(text)):
                if len(found) == limit:
                    rows.close()
                    return found, True
                found.append(one)
        return found, False

    def _missing(self, stored: StoredBatch) -> Iterator[Line]:
        """The requests without a result."""
        rows = self._database.connection.execute(
            "SELECT number, content FROM lines WHERE file = ? AND number NOT IN"
            " (SELECT number FROM lines WHERE file IN (?, ?)) ORDER BY number",
            (stored.input, stored.output, stored.errors),
        )
        return ((number, content) for number, content in rows if content.strip())

    def _count(self, identity: str) -> int:
        [count] = self._database.connection.execute(
            "SELECT COUNT(*) FROM lines WHERE file = ?", (identity,)
        ).fetchone()
        return int(count)


_TABLES = {"file": "files", "batch": "batches"}
#: Whether a tenant can read a row at a time. Files that are being written have no object yet.
_IS_VISIBLE = {
    "file": "tenant = ? AND NOT is_running AND expires >= ?",
    "batch": "tenant = ? AND (is_running OR expires >= ?)",
}
