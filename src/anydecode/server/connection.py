"""uvicorn's HTTP/1.1 protocol with limits on headers: their size, and the time in which they
arrive. Without them a connection could send one header line for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from anydecode.server.errors import ApiError, too_large_headers
from anydecode.server.settings import Settings


class LimitedProtocol(HttpToolsProtocol):
    """One connection. The limits are those of the application's `Settings`.

    Headers, chunk sizes and trailers of more than `max_header` bytes end the connection before they
    are complete. `AdmissionMiddleware` checks headers that arrive complete.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._settings: Settings = self.config.app.settings  # type: ignore[union-attr]
        self._num_bytes = 0  # received of these headers, or since the last part of the body
        self._has_headers = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
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
