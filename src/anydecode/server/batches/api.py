"""The handlers of the endpoints under `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import Any, Literal
from uuid import uuid4

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from anydecode.server.batches.lines import MAX_LINES
from anydecode.server.batches.protocol import BatchRequest
from anydecode.server.batches.runner import BatchRunner
from anydecode.server.batches.store import (
    BatchStore,
    Object,
    StorageFullError,
    TooManyBatchesError,
)
from anydecode.server.batches.upload import check_origin, parse_form
from anydecode.server.database import Database
from anydecode.server.errors import ApiError
from anydecode.server.events import EventStream
from anydecode.server.metrics import Metrics
from anydecode.server.settings import Settings

#: The values of `expires_after.seconds`, in seconds.
_MIN_AGE, _MAX_AGE = 3600, 30 * 86400
_MAX_NAME = 255
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TIMES = (
    "in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling",
    "cancelled",
)  # fmt: skip


class BatchesApi:
    """The endpoints under `/v1/files` and `/v1/batches`, with the batches that have not ended.

    Args:
        app: The ASGI application that runs the lines of batches.
        settings: The settings of the server.
        metrics: Counts the lines.
        database: The database of the files and batches; None if nothing is stored.
        check_model: Raises `ApiError` if a body names a model that is not served.
        check_capacity: Raises `ApiError` if the server has no room for another request.

    Raises:
        InvalidRequestError: The file of the database cannot be used.
    """

    def __init__(
        self,
        app: Any,
        settings: Settings,
        metrics: Metrics,
        database: Database | None,
        *,
        check_model: Callable[[Object], object],
        check_capacity: Callable[[], object],
    ) -> None:
        self._settings = settings
        self._store: BatchStore | None = None
        #: Its length is the number of lines that are running.
        self.runner: BatchRunner | None = None
        self._is_resumed = False
        if database is not None:
            self._store = BatchStore(database, settings.file_bytes, settings.store_seconds)
            self.runner = BatchRunner(
                app,
                self._store,
                metrics,
                max_lines=min(settings.batch_lines, max(1, settings.max_requests // 2)),
                max_body=settings.max_body,
                check_model=check_model,
                check_capacity=check_capacity,
            )

    def __len__(self) -> int:
        """The number of lines that are running."""
        return 0 if self.runner is None else len(self.runner)

    async def resume(self) -> None:
        """Go on with the batches that another process did not end."""
        if self._is_resumed or self._store is None or self.runner is None:
            return
        self._is_resumed = True
        for stored in await self._store.unfinished():
            self.runner.start(stored)

    async def drain(self, seconds: float | None = None) -> None:
        """Wait for the lines that are running, for at most `seconds`, by default the
        `drain_seconds` of the settings. What is left of the batches is run by the next process with
        the same file."""
        if self.runner is not None:
            limit = self._settings.drain_seconds if seconds is None else seconds
            await self.runner.drain(limit)

    async def upload(self, http: HttpRequest) -> Response:
        """Store a file."""
        check_origin(http)
        store, tenant = self._open(), http.scope["state"]["namespace"]
        form = await asyncio.to_thread(
            parse_form, http.headers.get("content-type", ""), await http.body()
        )
        purpose = form.fields.pop("purpose", None)
        if purpose != "batch":
            message = f"purpose is {purpose!r}; this server keeps files for batches: send batch"
            raise ApiError(400, message, param="purpose")
        seconds = _max_seconds(form.fields)
        if form.fields:
            name = next(iter(form.fields))
            raise ApiError(400, f"unknown field {name}", code="unknown_parameter", param=name)
        if len(form.filename) > _MAX_NAME:
            message = f"the name of the file has more than {_MAX_NAME} characters"
            raise ApiError(400, message, param="file")
        if form.content.count(b"\n") > MAX_LINES:
            message = f"the file has more than {MAX_LINES} lines; send several files"
            raise ApiError(400, message, param="file")
        try:
            lines = io.BytesIO(form.content)  # yields its lines
            return JSONResponse(await store.put_file(tenant, form.filename, lines, seconds))
        except StorageFullError:
            message = f"files may have {self._settings.file_bytes} bytes together; delete some"
            raise ApiError(413, message, code="storage_limit", param="file") from None

    async def files(
        self,
        http: HttpRequest,
        after: str | None,
        limit: int,
        order: Literal["asc", "desc"],
        purpose: str | None,
    ) -> Response:
        """List the files."""
        store, tenant = self._open(), http.scope["state"]["namespace"]
        return _page(
            await store.files(tenant, after, limit, order=order, purpose=purpose), "file", after
        )

    async def file(self, identity: str, http: HttpRequest) -> Response:
        """Describe a file."""
        file, _ = await self._file(identity, http)
        return JSONResponse(file)

    async def content(self, identity: str, http: HttpRequest) -> Response:
        """The content of a file."""
        file, store = await self._file(identity, http)

        async def parts() -> AsyncIterator[bytes]:
            number = 0
            while lines := await store.lines(identity, number):
                number = lines[-1][0]
                yield b"".join(content for _, content in lines)

        return EventStream(
            nullcontext(),
            parts(),
            self._settings.stall_seconds,
            lambda error: b"",  # the content is shorter than announced, which clients notice
            "application/octet-stream",
            [
                (b"content-length", b"%d" % file["bytes"]),
                (b"content-disposition", b"attachment"),
                (b"x-content-type-options", b"nosniff"),
            ],
        )

    async def delete(self, identity: str, http: HttpRequest) -> Response:
        """Remove a file."""
        deleted = await self._open().delete_file(http.scope["state"]["namespace"], identity)
        if deleted is None:
            message = f"a batch that has not ended uses the file {identity!r}; cancel it first"
            raise ApiError(400, message, code="file_in_use")
        if not deleted:
            raise _not_found("file", identity)
        return JSONResponse({"id": identity, "object": "file", "deleted": True})

    async def create(self, body: BatchRequest, http: HttpRequest) -> Response:
        """Start a batch."""
        store, tenant = self._open(), http.scope["state"]["namespace"]
        runner = await self._running()
        file = await store.file(tenant, body.input_file_id)
        if file is None:
            raise _not_found("file", body.input_file_id, "input_file_id")
        if file["purpose"] != "batch":
            message = f"the file is a {file['purpose']}; upload one with the purpose batch"
            raise ApiError(400, message, param="input_file_id")
        number, unit = int(body.completion_window[:-1]), body.completion_window[-1]
        now = time.time()
        expires = now + number * _UNITS[unit]
        batch = {
            "id": f"batch_{uuid4().hex}",
            "object": "batch",
            "endpoint": body.endpoint,
            "errors": None,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(now),
            **{f"{name}_at": None for name in _TIMES},
            "expires_at": int(expires),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": body.metadata,
        }
        age = body.output_expires_after
        max_seconds, max_batches = None if age is None else age.seconds, self._settings.max_batches
        try:
            stored = await store.put_batch(tenant, batch, expires, max_seconds, max_batches)
        except TooManyBatchesError:
            message = f"{max_batches} batches have not ended; try again when one has"
            raise ApiError(
                429, message, code="too_many_requests", headers={"retry-after": "60"}
            ) from None
        except StorageFullError:
            message = f"files may have {self._settings.file_bytes} bytes together; delete some"
            raise ApiError(413, message, code="storage_limit") from None
        if stored is None:  # removed since it was looked up
            raise _not_found("file", body.input_file_id, "input_file_id")
        answer = JSONResponse(batch)
        runner.start(stored)
        return answer

    async def batch(self, identity: str, http: HttpRequest) -> Response:
        """Describe a batch."""
        return JSONResponse(await self._batch(identity, http.scope["state"]["namespace"]))

    async def batches(self, http: HttpRequest, after: str | None, limit: int) -> Response:
        """List the batches, the newest first."""
        store, tenant = self._open(), http.scope["state"]["namespace"]
        runner = await self._running()
        found = await store.batches(tenant, after, limit)
        if found is not None:
            batches = [runner.get(tenant, one["id"]) or one for one in found[0]]
            found = batches, found[1]
        return _page(found, "batch", after)

    async def cancel(self, identity: str, http: HttpRequest) -> Response:
        """Cancel a batch."""
        tenant = http.scope["state"]["namespace"]
        runner = await self._running()
        if (batch := await runner.cancel(tenant, identity)) is None:
            batch = await self._batch(identity, tenant)
            message = f"the batch has the status {batch['status']}; only batches that have not"
            raise ApiError(400, f"{message} ended can be cancelled")
        return JSONResponse(batch)

    def _open(self) -> BatchStore:
        if self._store is None:
            message = "this server stores no files (--store none); start it with --store memory"
            raise ApiError(400, message, code="unsupported_parameter")
        return self._store

    async def _running(self) -> BatchRunner:
        self._open()
        await self.resume()
        assert self.runner is not None
        return self.runner

    async def _file(self, identity: str, http: HttpRequest) -> tuple[Object, BatchStore]:
        store = self._open()
        file = await store.file(http.scope["state"]["namespace"], identity)
        if file is None:
            raise _not_found("file", identity)
        return file, store

    async def _batch(self, identity: str, tenant: str | None) -> Object:
        runner = await self._running()
        batch = runner.get(tenant, identity) or await self._open().batch(tenant, identity)
        if batch is None:
            raise _not_found("batch", identity)
        return batch


def _page(found: tuple[list[Object], bool] | None, kind: str, after: str | None) -> Response:
    if found is None:
        raise ApiError(400, f"after is {after!r}, and there is no such {kind}", param="after")
    objects, has_more = found
    return JSONResponse(
        {
            "object": "list",
            "data": objects,
            "first_id": objects[0]["id"] if objects else None,
            "last_id": objects[-1]["id"] if objects else None,
            "has_more": has_more,
        }
    )


def _max_seconds(fields: dict[str, str]) -> float | None:
    """The age in the field `expires_after` of a form, which is removed from `fields`."""
    anchor = fields.pop("expires_after[anchor]", None)
    seconds = fields.pop("expires_after[seconds]", None)
    if anchor is None and seconds is None:
        return None
    is_valid = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 9
    if anchor != "created_at" or not is_valid or not _MIN_AGE <= int(seconds or 0) <= _MAX_AGE:
        message = (
            f'expires_after needs the anchor "created_at" and {_MIN_AGE} to {_MAX_AGE} seconds'
        )
        raise ApiError(400, message, param="expires_after")
    return float(seconds or 0)


def _not_found(kind: str, identity: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"there is no {kind} {identity!r}", code=f"{kind}_not_found", param=param)
