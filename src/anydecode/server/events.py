"""Server-sent events: an answer that grows while the client reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response

from anydecode.server.errors import ApiError, api_error
from anydecode.server.logs import log
from anydecode.server.run import ServerRun, left

DONE = b"data: [DONE]\n\n"
_HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}

#: A value as JSON without spaces. One encoder for all: making one costs more than most events.
compact = json.JSONEncoder(separators=(",", ":")).encode


def data(value: Any) -> bytes:
    """One event."""
    return b"data: " + compact(value).encode() + b"\n\n"


def failure(error: ApiError) -> bytes:
    """An error behind the head, as completions and chat tell it."""
    return data(error.to_dict())


class EventStream(Response):
    """An ASGI response that sends `chunks` of `run`. When the client leaves, or reads nothing for
    `stall` seconds, the run is cancelled. An error after the head becomes what `failed` makes of
    it."""

    def __init__(
        self,
        run: ServerRun,
        chunks: AsyncIterator[bytes],
        stall: float,
        failed: Callable[[ApiError], bytes] = failure,
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._run = run
        self._chunks = chunks
        self._stall = stall
        self._failed = failed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._run:
            await send(_HEAD)
            writing = asyncio.ensure_future(self._write(send))
            leaving = asyncio.ensure_future(left(receive))
            try:
                await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if writing.done() and not writing.cancelled():
                    writing.result()
            finally:
                leaving.cancel()
                writing.cancel()

    async def _write(self, send: Any) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        sending: float | None = None  # since when
        timer: asyncio.TimerHandle

        def look() -> None:
            """One timer for the whole stream: it moves to where the sending would have stalled."""
            nonlocal timer
            now = loop.time()
            due = (now if sending is None else sending) + self._stall
            if due > now:
                timer = loop.call_at(due, look)
            else:
                task.cancel()

        timer = loop.call_later(self._stall, look)
        try:
            async for chunk in self._chunks:
                sending = loop.time()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                sending = None
        except Exception as error:
            told = api_error(error)
            if told.status >= 500:
                log.exception("a stream failed")
            await send(
                {"type": "http.response.body", "body": self._failed(told), "more_body": True}
            )
        finally:
            timer.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
