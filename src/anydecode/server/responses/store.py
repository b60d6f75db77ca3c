"""Stored responses, bounded by bytes and age."""

from __future__ import annotations

import json
import time
import zlib
from typing import Any

from anydecode.server.database import Database, TenantRows

#: Bytes that a response is counted with, besides its texts.
_OVERHEAD = 1024
#: The statuses of responses that are being generated.
RUNNING = ("queued", "in_progress")
#: The error of a response whose server ended before it.
INTERRUPTED = {
    "code": "server_error",
    "message": "the server stopped while it generated this response; send the request again",
}
Item = dict[str, Any]


class ResponseStore:
    """The responses that a server has stored, each readable with the API key that created it.

    If their texts exceed `max_bytes`, the oldest responses of the key that stores the most are
    removed. Responses that are being generated are not removed. All methods but the constructor run
    on the thread of the database.

    Args:
        database: The database.
        max_bytes: Maximum size of the stored texts, in bytes.
        max_seconds: Maximum age of a response, in seconds.

    Raises:
        InvalidRequestError: The file of the database cannot be used.
    """

    def __init__(self, database: Database, max_bytes: int, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._database = database
        database.checked(self._fail_interrupted)
        self._rows = database.checked(
            lambda: TenantRows(database, "responses", max_bytes, "NOT is_running")
        )

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
            if size > self._rows.max_bytes:
                return False
            identity, status = response["id"], response["status"]
            with self._database.transaction():
                self._rows.remove("id = ?", identity)
                self._database.connection.execute(
                    "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (identity, tenant or "", response["created_at"], status in RUNNING, size)
                    + texts,
                )
                self._database.connection.executemany(
                    "INSERT OR IGNORE INTO items VALUES (?, ?)",
                    [(item["id"], identity) for item in (*items, *response["output"])],
                )
                self._rows.sizes[tenant or ""] += size
                self._rows.remove_aged("created < ?", self._oldest_time())
                self._rows.make_room(identity)
            return True

        return await self._database.run(put)

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
                row = self._database.connection.execute(
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

        return await self._database.run(find)

    async def delete(self, tenant: str | None, identity: str) -> bool:
        """Remove a response. Returns whether there was one."""

        def delete() -> bool:
            with self._database.transaction():
                return bool(self._rows.remove("id = ? AND tenant = ?", identity, tenant or ""))

        return await self._database.run(delete)

    async def _row(self, columns: str, tenant: str | None, identity: str) -> Any:
        def read() -> Any:
            return self._database.connection.execute(
                f"SELECT {columns} FROM responses WHERE id = ? AND tenant = ? AND created >= ?",
                (identity, tenant or "", self._oldest_time()),
            ).fetchone()

        return await self._database.run(read)

    def _oldest_time(self) -> float:
        return time.time() - self._max_seconds

    def _fail_interrupted(self) -> None:
        """Mark the responses that another process was generating as failed."""
        with self._database.connection:
            rows = self._database.connection.execute(
                "SELECT id, response FROM responses WHERE is_running"
            ).fetchall()
            for identity, text in rows:
                failed = {**json.loads(text), "status": "failed", "error": INTERRUPTED}
                self._database.connection.execute(
                    "UPDATE responses SET is_running = 0, response = ? WHERE id = ?",
                    (json.dumps(failed), identity),
                )
