"""Runs the lines of batches through the endpoints of the application, a few at a time."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import count
from secrets import token_hex
from typing import Any, TypeVar

from anydecode.engine.driver import INTERRUPTS
from anydecode.server import logs
from anydecode.server.batches.lines import LineCheck, failed_lines, request_of, result
from anydecode.server.batches.store import RUNNING, BatchStore, StorageFullError, StoredBatch
from anydecode.server.database import StoreError
from anydecode.server.errors import ApiError, api_error
from anydecode.server.metrics import Metrics

#: Maximum number of errors in a batch object. The error file has all of them.
MAX_ERRORS = 100
#: Seconds after which a line is tried again if the server has no room for it.
_RETRY_SECONDS = 0.1
#: Seconds after which a store that failed is used again.
STORE_SECONDS = 5.0
#: A line that the server refuses because it is busy is run so many times.
_MAX_TRIES = 4
#: The `priority` of lines that set none: offline work.
_PRIORITY = 1
#: By the status of a batch that ends early: the error of the lines that have not been run.
_UNRUN = {
    "expired": (
        "batch_expired",
        "the completion window of the batch ended before this request was run",
    ),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was run"),
}
_STORAGE_FULL = {
    "code": "storage_limit",
    "line": None,
    "message": "the files of this server have no room for the results; delete files",
    "param": None,
}
_EMPTY = {"code": "empty_file", "line": None, "message": "the file has no requests", "param": None}
_INTERNAL = {
    "code": "server_error",
    "line": None,
    "message": "a request of the batch failed; see the server's log for details",
    "param": None,
}
_Result = TypeVar("_Result")


class RunningBatch:
    """A batch that has not ended."""

    def __init__(self, stored: StoredBatch) -> None:
        self.stored = stored
        self.pending: deque[int] = deque()
        self.lines: set[asyncio.Task[None]] = set()  # that are running
        #: Set when no line is left to run, or when the batch is to end before.
        self.ended = asyncio.Event()
        self.has_failed = False  # as a whole

    @property
    def batch(self) -> dict[str, Any]:
        """The batch object."""
        return self.stored.batch

    def fail(self, error: dict[str, Any] | None = None) -> None:
        """End the batch, with an error beside those that it has."""
        self.has_failed = True
        if error is not None:
            self.add_error(error)
        self.ended.set()

    def add_error(self, error: dict[str, Any]) -> None:
        """Add an error to the batch object."""
        earlier = (self.batch["errors"] or {"data": []})["data"]
        if error not in earlier:
            self.batch["errors"] = {"object": "list", "data": [*earlier, error]}

    def end_if_done(self) -> None:
        """End the batch if it has no lines left."""
        if not self.pending and not self.lines:
            self.ended.set()


class BatchRunner:
    """The batches that have not ended. API keys take turns at running a line.

    Args:
        app: The ASGI application with the endpoints.
        store: The files and batches.
        metrics: Counts the lines.
        max_lines: Maximum number of lines that run at once.
        max_body: Maximum size of a request, in bytes.
        check_model: Raises `ApiError` if a body names a model that is not served.
        check_capacity: Raises `ApiError` if the server has no room for another request.
    """

    def __init__(
        self,
        app: Any,
        store: BatchStore,
        metrics: Metrics,
        *,
        max_lines: int,
        max_body: int,
        check_model: Callable[[dict[str, Any]], object],
        check_capacity: Callable[[], object],
    ) -> None:
        self._app = app
        self._store = store
        self._metrics = metrics
        self._max_lines = max_lines
        self._max_body = max_body
        self._check_model = check_model
        self._check_capacity = check_capacity
        self._batches: dict[str, RunningBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # one per batch
        self._num_lines = 0
        self._turns: dict[str | None, int] = {}  # by tenant: when it had its last turn
        self._clock = count(1)
        self._is_stopping = False
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """The number of lines that are running."""
        return self._num_lines

    def num_batches(self, tenant: str | None) -> int:
        """The number of batches of a tenant that have not ended."""
        return sum(one.stored.tenant == tenant for one in self._batches.values())

    def get(self, tenant: str | None, identity: str) -> dict[str, Any] | None:
        """The object of a batch that has not ended; None if this tenant has none of this id."""
        one = self._batches.get(identity)
        return None if one is None or one.stored.tenant != tenant else one.batch

    def start(self, stored: StoredBatch) -> None:
        """Run a batch, or the rest of one that another process did not end."""
        if self._is_stopping:
            return  # another process goes on with it
        one = self._batches[stored.batch["id"]] = RunningBatch(stored)
        task = asyncio.ensure_future(self._run(one))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self, tenant: str | None, identity: str) -> dict[str, Any] | None:
        """Start to cancel a batch. Returns its object; None if this tenant has none of this id that
        has not ended."""
        batch = self.get(tenant, identity)
        if batch is None or batch["status"] not in RUNNING:
            return None
        one = self._batches[identity]
        if one.batch["status"] in ("validating", "in_progress"):
            one.batch.update(status="cancelling", cancelling_at=int(time.time()))
            one.ended.set()
            with suppress(StoreError):  # its end is stored as soon as the store can be written
                await self._store.update(one.stored)
        return one.batch

    async def drain(self, seconds: float) -> None:
        """Start no more lines, and wait for those that run. Those that still run after `seconds`
        end without a result: the next process runs them again."""
        self._is_stopping = True
        if self._timer is not None:
            self._timer.cancel()
        lines = {task for one in self._batches.values() for task in one.lines}
        if lines:
            await asyncio.wait(lines, timeout=seconds)
        tasks = [*lines, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, one: RunningBatch) -> None:
        """Validate a batch, let its lines run, and store its end."""
        try:
            if one.batch["status"] == "validating":
                await self._validate(one)
            await self._continue(one)
            await self._finish(one, await self._end(one))
        except sqlite3.Error:
            logs.log.exception("the store is damaged: a batch stops until a restart")
        finally:
            self._batches.pop(one.batch["id"], None)
            if not self.num_batches(one.stored.tenant):
                self._turns.pop(one.stored.tenant, None)

    async def _end(self, one: RunningBatch) -> str:
        """Wait until a batch ends. Returns its last status."""
        seconds = one.stored.expires - time.time()
        is_expired = False
        if not one.ended.is_set():
            try:
                await asyncio.wait_for(one.ended.wait(), max(0.0, seconds))
            except asyncio.TimeoutError:
                is_expired = True
        one.pending.clear()
        for task in one.lines:
            task.cancel()
        if one.lines:
            await asyncio.wait(one.lines)
        if one.has_failed:
            return "failed"
        if one.batch["status"] == "cancelling":
            return "cancelled"
        return "expired" if is_expired else "completed"

    async def _validate(self, one: RunningBatch) -> None:
        check = LineCheck(one.batch["endpoint"], self._max_body, self._check_model)
        errors, failed = [], []
        total = after = 0
        while lines := await _stored(partial(self._store.lines, one.stored.input, after)):
            after = lines[-1][0]
            total += sum(bool(text.strip()) for _, text in lines)
            for entry, line in await asyncio.to_thread(failed_lines, check, lines):
                errors.append(entry)
                failed.append(line)
        counts = {"total": total, "completed": 0, "failed": len(failed)}
        one.batch["request_counts"] = counts
        if one.batch["status"] == "validating":  # not cancelled
            one.batch.update(status="in_progress", in_progress_at=int(time.time()))
        if errors or not total:
            one.batch["errors"] = {"object": "list", "data": errors[:MAX_ERRORS] or [_EMPTY]}
        try:
            await _stored(partial(self._store.start, one.stored, failed))
        except StorageFullError:
            one.fail(_STORAGE_FULL)
        else:
            if len(failed) == total:
                one.fail()

    async def _continue(self, one: RunningBatch) -> None:
        """Let the lines without a result run."""
        missing, num_answers, num_errors = await _stored(partial(self._store.progress, one.stored))
        counts = {"completed": num_answers, "failed": num_errors}
        one.batch["request_counts"] = {**one.batch["request_counts"], **counts}
        if one.batch["status"] == "cancelling":
            one.ended.set()
        if not one.ended.is_set():
            one.pending.extend(missing)
            one.end_if_done()
            self._advance()

    async def _finish(self, one: RunningBatch, status: str) -> None:
        """Store the end of a batch."""
        if status == "completed":
            one.batch.update(status="finalizing", finalizing_at=int(time.time()))
        unrun = None if status not in _UNRUN else partial(_unrun, status)
        fields = {"status": status, f"{status}_at": int(time.time())}
        try:
            await _stored(partial(self._store.finish, one.stored, unrun, fields))
        except StorageFullError:
            one.add_error(_STORAGE_FULL)
            await _stored(partial(self._store.finish, one.stored, None, fields))
        logs.event("batch", id=one.batch["id"], status=status, **one.batch["request_counts"])

    def _advance(self) -> None:
        """Start lines while there is room for them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while not self._is_stopping and self._num_lines < self._max_lines:
            ready = [one for one in self._batches.values() if one.pending]
            if not ready:
                return
            try:
                self._check_capacity()
            except ApiError:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(_RETRY_SECONDS, self._advance)
                return
            one = min(ready, key=lambda one: self._turns.get(one.stored.tenant, 0))
            self._turns[one.stored.tenant] = next(self._clock)
            self._start_line(one, one.pending.popleft())

    def _start_line(self, one: RunningBatch, number: int) -> None:
        task = asyncio.ensure_future(self._run_line(one, number))
        self._num_lines += 1
        one.lines.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._num_lines -= 1
            one.lines.discard(task)
            if task.cancelled():
                return  # its batch ends, or the server
            if (fault := task.exception()) is not None:
                logs.log.error("a line of a batch failed", exc_info=fault)
                one.fail(_INTERNAL)
            one.end_if_done()
            self._advance()

        task.add_done_callback(end)

    async def _run_line(self, one: RunningBatch, number: int) -> None:
        [(_, text)] = await _stored(partial(self._store.lines, one.stored.input, number - 1, 1))
        request = request_of(text)
        body = request["body"]
        if one.batch["endpoint"] != "/v1/embeddings" and body.get("priority") is None:
            body["priority"] = _PRIORITY
        content = json.dumps(body).encode()
        for attempt in range(_MAX_TRIES):
            identity = token_hex(16)
            status, answer = await self._send(one, content, identity)
            if status not in (429, 503):
                break
            await asyncio.sleep(_RETRY_SECONDS * 4**attempt)
        if status == 503 and not self._can_run():
            one.pending.appendleft(number)  # the next process runs it
            return
        is_error = status != 200
        response = {"status_code": status, "request_id": identity, "body": json.loads(answer)}
        line = result(request["custom_id"], response=response)
        try:
            await _stored(partial(self._store.add, one.stored, number, line, is_error))
        except StorageFullError:
            one.fail(_STORAGE_FULL)
            return
        one.batch["request_counts"]["failed" if is_error else "completed"] += 1

    def _can_run(self) -> bool:
        """Whether the server accepts requests, now or later."""
        try:
            self._check_capacity()
        except ApiError as error:
            return error.status == 429
        return True

    async def _send(self, one: RunningBatch, content: bytes, identity: str) -> tuple[int, bytes]:
        """The status and the body of the application's answer to one request."""
        state: dict[str, Any] = {
            "id": identity,
            "namespace": one.stored.tenant,
            "client": "batch",
        }
        endpoint = one.batch["endpoint"]
        try:
            status, answer = await call(self._app, endpoint, content, state)
        except (asyncio.CancelledError, *INTERRUPTS):
            raise
        except BaseException as fault:  # an unexpected error, or the panic of a native library
            logs.log.error("a line of a batch failed", exc_info=fault)
            error = api_error(fault)
            status, answer = error.status, error.to_json(endpoint)
        if (count_run := state.pop("count", None)) is not None:
            count_run()
        self._metrics.batch_lines.labels(endpoint, str(status)).inc()
        facts = state.get("facts", {})
        logs.event("line", id=identity, batch=one.batch["id"], status=status, **facts)
        return status, answer


async def _stored(use: Callable[[], Awaitable[_Result]]) -> _Result:
    """The result of using the store. While the store fails, as when its disk is full, it is tried
    again: batches wait, and lose nothing."""
    while True:
        try:
            return await use()
        except StoreError:
            await asyncio.sleep(STORE_SECONDS)


def _unrun(status: str, text: bytes) -> bytes:
    """The result of a line that has not been run, and may be invalid."""
    code, message = _UNRUN[status]
    try:
        custom_id = request_of(text).get("custom_id")
    except ApiError:
        custom_id = None
    return result(custom_id, error={"code": code, "message": message})


async def call(app: Any, path: str, content: bytes, state: dict[str, Any]) -> tuple[int, bytes]:
    """POST a JSON body to an ASGI application. Returns the status and the body of its answer.

    Args:
        app: The application.
        path: The path of the endpoint.
        content: The body.
        state: The `state` of the scope.
    """
    status, parts = 500, bytearray()
    is_read = False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()  # the client does not disconnect
        is_read = True
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": state,
    }
    await app(scope, receive, send)
    return status, bytes(parts)
