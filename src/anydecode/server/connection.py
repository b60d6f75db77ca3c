"""uvicorn's HTTP/1.1 protocol with limits on headers, their size and the time in which they arrive,
and on the time for which a client leaves an answer unread. Without them a connection could send one
header line for ever, or keep the memory of an answer."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from anydecode.server.errors import ApiError, too_large_headers
from anydecode.server.settings import Settings


class LimitedProtocol(HttpToolsProtocol):
    """One connection. The limits are those of the application's `Settings`.

    Headers, chunk sizes and trailers of more than `max_header` bytes end the connection before they
    are complete. `AdmissionMiddleware` checks headers that arrive complete. A client that reads
    nothing of what is left of its answer for `stall_seconds` is disconnected: a socket that is only
    closed stays open until all is read.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._settings: Settings = self.config.app.settings  # type: ignore[union-attr]
        self._num_bytes = 0  # received of these headers, or since the last part of the body
        self._has_headers = False
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > self._settings.max_header:
            self._refuse(too_large_headers(self._settings.max_header))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_headers = False
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._num_bytes = 0
        self._has_headers = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_buffer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_buffer()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "the request is not valid HTTP/1.1", code="invalid_request"))

    def _watch_buffer(self) -> None:
        """Disconnect the client if it reads nothing of what is buffered now for `stall_seconds`."""
        self._stop_stall_timer()
        if size := self.transport.get_write_buffer_size():
            seconds = self._settings.stall_seconds
            self._stall_timer = self.loop.call_later(seconds, self._check_stall, size)

    def _check_stall(self, size_before: int) -> None:
        # Nothing has been added since `_watch_buffer` has seen the buffer, except to an answer that
        # has begun since then: its end, or a full buffer, is seen too.
        is_answering = self.cycle is not None and not self.cycle.response_complete
        may_grow = is_answering and not (self.flow.write_paused or self.transport.is_closing())
        if may_grow or self.transport.get_write_buffer_size() < size_before:
            self._watch_buffer()
        else:
            self.transport.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _start_timer(self) -> None:
        self._stop_timer()
        seconds = self._settings.body_seconds
        message = f"the headers were not sent within {seconds:g} s"
        error = ApiError(408, message, code="request_timeout")
        self._timer = self.loop.call_later(seconds, self._refuse, error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with `error` as the response if none is being sent."""
        if self.transport.is_closing():
            return
        if not self._has_headers and (self.cycle is None or self.cycle.response_complete):
            body = error.to_json()
            head = b"content-type: application/json\r\nconnection: close\r\n"
            length = b"content-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + length + body)
        self.transport.close()
        self._watch_buffer()
