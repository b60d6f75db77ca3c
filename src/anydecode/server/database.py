"""A SQLite database, in memory or in a file, and its tables whose rows belong to API keys."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

from anydecode.errors import InvalidRequestError
from anydecode.server.errors import ApiError
from anydecode.server.logs import log

#: Marks a file as such a database (`PRAGMA application_id`), and the version of its tables.
_APPLICATION_ID, _VERSION = 0x616E7944, 2
#: By version: the tables that it adds.
_TABLES = {
    1: """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, is_running INTEGER NOT NULL,
    size INTEGER NOT NULL, response TEXT NOT NULL, input TEXT NOT NULL, events BLOB NOT NULL);
CREATE INDEX by_age ON responses (tenant, is_running, created);
CREATE TABLE items (
    id TEXT NOT NULL, response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
    PRIMARY KEY (id, response)) WITHOUT ROWID;
CREATE INDEX by_response ON items (response);
""",
    2: """
CREATE TABLE files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
    is_running INTEGER NOT NULL, size INTEGER NOT NULL, file TEXT NOT NULL);
CREATE INDEX files_by_tenant ON files (tenant, created);
CREATE TABLE lines (
    file TEXT NOT NULL REFERENCES files ON DELETE CASCADE, number INTEGER NOT NULL,
    content BLOB NOT NULL, PRIMARY KEY (file, number));
CREATE TABLE batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
    is_running INTEGER NOT NULL, size INTEGER NOT NULL, batch TEXT NOT NULL, input TEXT NOT NULL,
    output TEXT NOT NULL, errors TEXT NOT NULL);
CREATE INDEX batches_by_tenant ON batches (tenant, created);
CREATE INDEX batches_by_input ON batches (is_running, input);
""",
}
_Result = TypeVar("_Result")


class StoreError(ApiError):
    """The database cannot be read or written now, as when its disk is full. Nothing of the request
    is stored."""

    def __init__(self, error: sqlite3.OperationalError) -> None:
        message = f"the server's store failed: {error}; nothing of this request is stored"
        super().__init__(507, message, code="storage_failed")


class Database:
    """An open database, which other processes cannot open at the same time.

    Args:
        where: A file, which is created if it is missing, or "memory".

    Raises:
        InvalidRequestError: The file cannot be used.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._tables: list[TenantRows] = []
        self.connection = self.checked(lambda: _open(where))
        self._executor = ThreadPoolExecutor(1, "anydecode-store")

    def checked(self, function: Callable[[], _Result]) -> _Result:
        """The result of `function`. Its errors are those of the option that names the file."""
        try:
            return function()
        except (sqlite3.Error, OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidRequestError(
                f"--store {self._where}: {reason}; give a file that one server of anydecode"
                " writes, 'memory' or 'none'"
            ) from None

    async def run(self, function: Callable[[], _Result]) -> _Result:
        """Call `function` on the database's thread, after those that were given before.

        Raises:
            StoreError: The database cannot be read or written.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, function)
        except sqlite3.OperationalError as error:
            log.exception("the store failed: %s", error)
            raise StoreError(error) from None

    def add_table(self, table: TenantRows) -> None:
        """Let `table` read its sizes again after a transaction that failed."""
        self._tables.append(table)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what the block writes; nothing of it if it raises."""
        try:
            with self.connection:
                yield
        except BaseException as error:
            if isinstance(error, sqlite3.OperationalError):
                self._truncate_journal()
            for table in self._tables:
                table.read_sizes()
            raise

    def _truncate_journal(self) -> None:
        """Give the room of what could not be written back to the disk."""
        with suppress(sqlite3.OperationalError):  # no room for what was committed before, either
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Finish the pending writes and close the database."""
        self._executor.submit(self.connection.close)
        self._executor.shutdown()


class TenantRows:
    """The rows of one table that belong to tenants, bounded by their size and age.

    The table has the columns `id`, `tenant`, `created` and `size`.

    Args:
        database: The database.
        name: The name of the table.
        max_bytes: Maximum size of all rows, in bytes.
        removable: The condition, in SQL, of rows that may be removed.
    """

    def __init__(self, database: Database, name: str, max_bytes: int, removable: str) -> None:
        self._database = database
        self._name = name
        self._removable = removable
        self.max_bytes = max_bytes
        #: The size of the rows by tenant, in bytes.
        self.sizes: Counter[str] = Counter()
        self.read_sizes()
        database.add_table(self)

    @property
    def is_full(self) -> bool:
        """Whether the rows are larger than `max_bytes`."""
        return self.sizes.total() > self.max_bytes

    def read_sizes(self) -> None:
        """Compute `sizes` from the table."""
        rows = self._database.connection.execute(
            f"SELECT tenant, SUM(size) FROM {self._name} GROUP BY tenant"
        )
        self.sizes = Counter(dict(rows.fetchall()))

    def remove(self, condition: str, *values: object) -> int:
        """Remove the rows that satisfy `condition`. Returns their number."""
        rows = self._database.connection.execute(
            f"SELECT id, tenant, size FROM {self._name} WHERE {condition}", values
        ).fetchall()
        for identity, tenant, size in rows:
            self._database.connection.execute(f"DELETE FROM {self._name} WHERE id = ?", (identity,))
            self.sizes[tenant] -= size
        return len(rows)

    def remove_aged(self, condition: str, *values: object) -> int:
        """Remove the rows that satisfy `condition` and may be removed."""
        return self.remove(f"{self._removable} AND {condition}", *values)

    def make_room(self, kept: str) -> None:
        """While the rows are larger than `max_bytes`, remove the oldest one, but not `kept`, of the
        tenant that stores the most, if there is one that may be removed."""
        while self.is_full and self._remove_oldest(kept):
            pass

    def _remove_oldest(self, kept: str) -> int:
        for tenant, _ in self.sizes.most_common():
            oldest = (
                f"id = (SELECT id FROM {self._name} WHERE tenant = ? AND {self._removable}"
                " AND id != ? ORDER BY created LIMIT 1)"
            )
            if removed := self.remove(oldest, tenant, kept):
                return removed
        return 0


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
    if not is_empty and (application != _APPLICATION_ID or version not in _TABLES):
        raise ValueError("it is a database of another program or version")
    if is_empty:
        database.execute("PRAGMA auto_vacuum = FULL")
    database.execute("PRAGMA journal_mode = WAL")  # commits do not wait for the disk
    if version < _VERSION:
        tables = "".join(_TABLES[number] for number in range(version + 1, _VERSION + 1))
        database.executescript(
            f"BEGIN EXCLUSIVE; {tables} PRAGMA application_id = {_APPLICATION_ID};"
            f" PRAGMA user_version = {_VERSION}; COMMIT;"
        )
