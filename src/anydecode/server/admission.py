"""Checks on every request before its handler runs: host, API key, body size, and capacity."""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Awaitable, Callable, Sequence, Sized
from secrets import token_hex
from time import perf_counter, time_ns
from typing import Any

from anydecode.engine.driver import INTERRUPTS
from anydecode.errors import AnydecodeError
from anydecode.server import logs
from anydecode.server.errors import ApiError, api_error, too_large_headers
from anydecode.server.metrics import Metrics
from anydecode.server.run import Disconnected
from anydecode.server.settings import Settings, is_loopback
from anydecode.server.telemetry import OPERATIONS, Telemetry

#: Paths that report the load; they need an API key if keys are configured.
METRICS_PATHS = ("/metrics", "/live")
#: The starts of the paths that need an API key; a POST to them is inference.
_API_PREFIXES = ("/v1/", "/v2/", "/api/", "/tokenize", "/detokenize", "/rerank", "/score")
#: Paths that are recorded also if a request is refused before it is routed.
_PATHS = frozenset((*METRICS_PATHS, *OPERATIONS))

#: The path of uploaded files, which may be larger than other bodies.
UPLOAD_PATH = "/v1/files"
#: Maximum number of files that are received at once.
MAX_UPLOADS = 8
#: All bodies together are received at this rate, after the first part of each.
BODY_BYTES_PER_SECOND = 64 << 20
#: Shorter waits, in seconds, are skipped: timers are not that precise.
_SHORTEST_WAIT = 0.002

Message = dict[str, Any]


class AdmissionMiddleware:
    """ASGI middleware that admits or refuses each request, and records it when it ends.

    On a loopback address, only loopback host names (and `allowed_hosts`) are accepted, which blocks
    DNS rebinding: a web page whose own host name resolves to this machine is refused. Paths that
    start with one of `_API_PREFIXES` need an API key if keys are configured. A POST to them needs
    every engine to be running and fewer than `max_requests` active requests, those in the
    `background` included; a POST that cancels one does not. A request becomes active when its body
    is complete, so that clients that send slowly take no capacity from others. At most
    `max_requests` bodies, and `MAX_UPLOADS` files, may be received in part; of more, the one that
    has taken longest is refused.

    `fault` returns why an engine has stopped, or None.

    `scope["state"]` receives the request's `id`, the address of its `client`, and the key's
    `namespace`. If a handler stores a function there as `count`, it is called when the request
    ends. Every request is then counted in `metrics`, logged, and recorded by `telemetry`.
    """

    def __init__(
        self,
        app: Any,
        fault: Callable[[], AnydecodeError | None],
        settings: Settings,
        metrics: Metrics,
        telemetry: Telemetry | None = None,
        background: Sequence[Sized] = (),
    ) -> None:
        self.app = app
        self._background = background
        self.fault = fault
        self.telemetry = telemetry
        self._is_local = is_loopback(settings.host)
        self.settings = settings
        self.metrics = metrics
        self.active = 0
        self._receiving: dict[asyncio.Future[None], None] = {}  # the oldest is the first
        self._uploading: dict[asyncio.Future[None], None] = {}  # the same, of uploaded files
        self._pace = Pace(BODY_BYTES_PER_SECOND)
        self.draining = False
        self._namespaces = settings.namespaces
        self._log_key = logs.log_key()
        self._mean_seconds = 1.0

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = RequestScope(self, scope, receive, send)
        is_inference = (
            scope["method"] == "POST"
            and scope["path"].startswith(_API_PREFIXES)
            and not scope["path"].endswith("/cancel")
        )
        try:
            self._admit(request)
            if is_inference:
                await self._receive_body(request)
                self.check_capacity()
        except ApiError as error:
            await request.refuse(error)
            self._record(request, "refused")
            return
        except Disconnected:
            self._record(request, "refused")
            return
        self.active += is_inference
        try:
            await self.app(scope, request.receive, request.send)
        except (asyncio.CancelledError, *INTERRUPTS):
            raise
        except BaseException as fault:  # an unexpected error, or the panic of a native library
            if request.status and not request.is_complete:
                raise  # closes the connection
            logs.log.error("a request failed", exc_info=fault)
            if not request.status:
                await request.refuse(api_error(fault))
        finally:
            self.active -= is_inference
            if is_inference:
                self._mean_seconds += 0.1 * (request.seconds - self._mean_seconds)
            self._record(request)

    def _admit(self, request: RequestScope) -> None:
        """Check what precedes the body."""
        scope = request.scope
        size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        state["id"] = request.id
        state["namespace"] = None
        state["client"] = (scope.get("client") or (None,))[0]
        if size > self.settings.max_header:
            raise too_large_headers(self.settings.max_header)
        self._check_host(headers)
        needs_key = scope["path"] in METRICS_PATHS and not self.settings.open_metrics
        if self._namespaces and (needs_key or scope["path"].startswith(_API_PREFIXES)):
            state["namespace"] = self._namespace(headers)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > (limit := self._max_body(scope)):
            raise _too_large_body(limit)

    def _max_body(self, scope: Message) -> int:
        is_upload = scope["method"] == "POST" and scope["path"] == UPLOAD_PATH
        return self.settings.max_file if is_upload else self.settings.max_body

    async def _receive_body(self, request: RequestScope) -> None:
        """Receive the body. Raises `ApiError` or `Disconnected`."""

        limit = self._max_body(request.scope)
        receiving, max_bodies = self._receiving, self.settings.max_requests
        if request.scope["path"] == UPLOAD_PATH:
            receiving, max_bodies = self._uploading, min(max_bodies, MAX_UPLOADS)

        async def on_part(size: int) -> None:
            if task not in receiving:
                receiving[task] = None
                if len(receiving) > max_bodies:
                    next(iter(receiving)).cancel()
            await self._pace.wait(size)

        task = asyncio.ensure_future(request.receive_body(limit, on_part))
        try:
            await asyncio.wait({task}, timeout=self.settings.body_seconds)
        finally:
            receiving.pop(task, None)
            is_complete = task.done() and not task.cancelled()
            task.cancel()
        if not is_complete:
            message = f"the body was not sent within {self.settings.body_seconds:g} s"
            if len(receiving) >= max_bodies:
                message = f"the body was not sent, and {len(receiving)} others are being sent"
            raise ApiError(408, message, code="request_timeout", headers={"connection": "close"})
        task.result()

    def check_capacity(self) -> None:
        """Raise `ApiError` if there is no room for another request."""
        if (error := self.fault()) is not None:
            raise api_error(error)
        if self.draining:
            raise ApiError(503, "the server is shutting down", headers={"retry-after": "5"})
        num_running = self.active + sum(map(len, self._background))
        if num_running >= self.settings.max_requests:
            wait = str(min(60, max(1, math.ceil(self._mean_seconds))))
            message = f"{num_running} requests are already running; try again in {wait} s"
            raise ApiError(429, message, code="too_many_requests", headers={"retry-after": wait})

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        allowed = self.settings.allowed_hosts
        if b"host" not in headers or "*" in allowed or not (self._is_local or allowed):
            return
        name = host_name(headers[b"host"].decode("latin-1"))
        if name not in allowed and not (self._is_local and is_loopback(name)):
            message = f"the host {name!r} is not allowed; --allow-host {name} allows it"
            raise ApiError(403, message, code="host_not_allowed")

    def _namespace(self, headers: dict[bytes, bytes]) -> str:
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [headers.get(b"x-api-key", b""), bearer if scheme.lower() == b"bearer" else b""]
        result = None
        for key, namespace in self._namespaces.items():  # no early exit: constant time
            for value in given:
                if hmac.compare_digest(key.encode(), value.strip()):
                    result = namespace
        if result is None:
            raise ApiError(
                401,
                "this server requires an API key; send it as Authorization: Bearer KEY or as"
                " x-api-key: KEY",
                code="invalid_api_key",
            )
        return result

    def _record(self, request: RequestScope, endpoint: str = "other") -> None:
        """Count and log a request that has ended. `endpoint` is its metric label if it has no
        route: paths are the client's choice, and every label takes memory for ever."""
        if (count := request.scope["state"].get("count")) is not None:
            count()
        route, path = getattr(request.scope.get("route"), "path", None), request.scope["path"]
        # Never a path that is not an endpoint's: the caller may have written anything there.
        path = route or (path if path in _PATHS else "other")
        endpoint = route or endpoint
        self.metrics.requests.labels(endpoint, str(request.status or 499)).inc()
        logs.event(
            "request",
            id=request.id,
            method=request.scope["method"],
            path=path,
            status=request.status or 499,
            ms=round(request.seconds * 1e3, 2),
            tenant=logs.tenant_name(request.scope["state"]["namespace"], self._log_key),
            **request.scope["state"].get("facts", {}),
        )
        if self.telemetry is not None:
            headers = {
                k.decode("latin-1"): v.decode("latin-1") for k, v in request.scope["headers"]
            }
            self.telemetry.record(
                method=request.scope["method"],
                path=path,
                status=request.status or 499,
                headers=headers,
                start_ns=request.start_ns,
                end_ns=time_ns(),
                facts=request.scope["state"].get("facts", {}),
            )


class Pace:
    """Limits the rate of bytes that several clients send: the event loop copies them, and has to
    send tokens in time too."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._end = 0.0  # of the time that the bytes so far take

    async def wait(self, size: int) -> None:
        """Wait until `size` bytes may be followed by more."""
        now = perf_counter()
        self._end = max(self._end, now) + size / self._rate
        if self._end > now + _SHORTEST_WAIT:
            await asyncio.sleep(self._end - now)


def _too_large_body(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes"
    return ApiError(413, message, code="body_too_large", headers={"connection": "close"})


def host_name(host: str) -> str:
    """The host of a Host header, without the port: `[::1]:80` gives `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


class RequestScope:
    """One admitted request: its id, status and timing, and its wrapped `receive` and `send`."""

    def __init__(
        self, admission: AdmissionMiddleware, scope: Message, receive: Any, send: Any
    ) -> None:
        self.scope = scope
        self.id = token_hex(16)
        self.status = 0
        self.is_complete = False  # the response
        self._body: bytes | None = None  # received, but not read by the application
        self._receive = receive
        self._send = send
        self._start = perf_counter()
        self.start_ns = time_ns()

    @property
    def seconds(self) -> float:
        return perf_counter() - self._start

    async def receive(self) -> Message:
        """The next ASGI message of the request."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message: Message = await self._receive()
        return message

    async def receive_body(self, limit: int, on_part: Callable[[int], Awaitable[None]]) -> None:
        """Receive the whole body, for `receive` to return.

        Args:
            limit: Its largest size, in bytes.
            on_part: Called with the size of each part but the last, in bytes.

        Raises:
            ApiError: The body is larger than `limit` bytes.
            Disconnected: The client disconnects.
        """
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            part = message.get("body", b"")
            body += part
            if len(body) > limit:
                raise _too_large_body(limit)
            if not message.get("more_body", False):
                break
            await on_part(len(part))
        self._body = bytes(body)

    async def send(self, message: Message) -> None:
        """Forward a response message, with an `x-request-id` header added."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", []), (b"x-request-id", self.id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True

    async def refuse(self, error: ApiError) -> None:
        """Send an error response without calling the application."""
        body = error.to_json(self.scope["path"])
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **error.headers,
        }
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": pairs})
        await self.send({"type": "http.response.body", "body": body})
