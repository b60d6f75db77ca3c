"""Responses that are streamed while they are generated, as server-sent events or lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.responses import Response

from anydecode.server.errors import ApiError, api_error
from anydecode.server.logs import log
from anydecode.server.run import wait_for_disconnect

DONE = b"data: [DONE]\n\n"
_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

#: Encodes a value as JSON without spaces. Shared, because constructing an encoder costs more than
#: encoding most events.
compact = json.JSONEncoder(separators=(",", ":")).encode


def encode_event(value: Any) -> bytes:
    """One server-sent event with `value` as JSON."""
    return b"data: " + compact(value).encode() + b"\n\n"


def encode_error(error: ApiError) -> bytes:
    """The event of an error in a completion or chat stream."""
    return encode_event(error.to_dict())


class EventStream(Response):
    """An ASGI response that streams `chunks`, server-sent events by default, while `run`, a context
    manager, is entered.

    The block ends, which cancels a `ServerRun`, when the client disconnects or reads nothing for
    `stall_seconds`. An error after the response has started is sent as an event.
    """

    def __init__(
        self,
        run: AbstractAsyncContextManager[Any],
        chunks: AsyncIterator[bytes],
        stall_seconds: float,
        encode_failure: Callable[[ApiError], bytes] = encode_error,
        media_type: str = "text/event-stream; charset=utf-8",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(media_type=media_type)
        self._all_headers = [(b"content-type", media_type.encode()), *_HEADERS, *headers]
        self._run = run
        self._chunks = chunks
        self._stall_seconds = stall_seconds
        self._encode_failure = encode_failure

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._run:
            await send({"type": "http.response.start", "status": 200, "headers": self._all_headers})
            writing = asyncio.ensure_future(self._write(send))
            disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
            try:
                await asyncio.wait({writing, disconnect}, return_when=asyncio.FIRST_COMPLETED)
                if writing.done() and not writing.cancelled():
                    writing.result()
            finally:
                disconnect.cancel()
                writing.cancel()

    async def _write(self, send: Any) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        send_start: float | None = None  # None: no send is pending
        timer: asyncio.TimerHandle

        def check_stall() -> None:
            """Cancel a stalled send, or set the timer to the time at which it would be stalled. One
            timer serves the whole stream."""
            nonlocal timer
            now = loop.time()
            deadline = (now if send_start is None else send_start) + self._stall_seconds
            if deadline > now:
                timer = loop.call_at(deadline, check_stall)
            else:
                task.cancel()

        timer = loop.call_later(self._stall_seconds, check_stall)
        try:
            async for chunk in self._chunks:
                send_start = loop.time()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                send_start = None
        except Exception as error:
            api_failure = api_error(error)
            if api_failure.status >= 500 and api_failure is not error:
                log.exception("a stream failed")
            await send(
                {
                    "type": "http.response.body",
                    "body": self._encode_failure(api_failure),
                    "more_body": True,
                }
            )
        finally:
            timer.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
