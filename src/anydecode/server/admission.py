"""What every request passes before a handler sees it: host, key, size, and a free place."""

from __future__ import annotations

import hmac
import ipaddress
import math
from functools import lru_cache
from secrets import token_hex
from time import perf_counter, time_ns
from typing import Any

from fastapi import HTTPException

from anydecode.engine.driver import Driver
from anydecode.server import logs
from anydecode.server.errors import ApiError, api_error
from anydecode.server.metrics import Metrics
from anydecode.server.settings import Settings
from anydecode.server.telemetry import Telemetry

#: What tells about the load, and needs a key where there are keys.
FIGURES = ("/metrics", "/live")

Message = dict[str, Any]


class TooLarge(HTTPException):
    """The body turned out to be longer than it may be."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"the body is larger than {limit} bytes")


class AdmissionMiddleware:
    """ASGI middleware around the whole application.

    On the loopback it answers to the loopback's names only: a page from elsewhere whose own name
    was made to point here (DNS rebinding) is refused. Under `/v1/` it asks for the API key, and for
    a free place where something is to be computed (POST); once the engine of `driver` has stopped,
    all that is refused. `scope["state"]` gets the request's id
    and the key's namespace; what a handler leaves there as `count` is called at the end. Every
    request is counted, logged and told to `telemetry` when it ends.
    """

    def __init__(
        self,
        app: Any,
        driver: Driver,
        settings: Settings,
        metrics: Metrics,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.app = app
        self.driver = driver
        self.telemetry = telemetry
        self._local = is_loopback(settings.host)
        self.settings = settings
        self.metrics = metrics
        self.active = 0
        self.draining = False
        self._namespaces = settings.namespaces
        self._mean_seconds = 1.0

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        visit = RequestScope(self, scope, receive, send)
        computes = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        try:
            self._admit(visit, computes)
        except ApiError as error:
            await visit.refuse(error)
            self._ended(visit)
            return
        self.active += computes
        try:
            await self.app(scope, visit.receive, visit.send)
        finally:
            self.active -= computes
            if computes:
                self._mean_seconds += 0.1 * (visit.seconds - self._mean_seconds)
            self._ended(visit)

    def _admit(self, visit: RequestScope, computes: bool) -> None:
        scope = visit.scope
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        state["id"] = visit.id
        state["namespace"] = None
        self._check_host(headers)
        guarded = scope["path"] in FIGURES and not self.settings.open_metrics
        if self._namespaces and (guarded or scope["path"].startswith("/v1/")):
            state["namespace"] = self._namespace(headers)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.settings.max_body:
            limit = self.settings.max_body
            message = f"the body is larger than {limit} bytes"
            raise ApiError(413, message, code="body_too_large")
        if computes and (error := self.driver.error) is not None:
            raise api_error(error)
        if computes and self.draining:
            raise ApiError(503, "the server is shutting down", headers={"retry-after": "5"})
        if computes and self.active >= self.settings.max_requests:
            wait = str(min(60, max(1, math.ceil(self._mean_seconds))))
            message = f"{self.active} requests are at work already; try again in {wait} s"
            raise ApiError(429, message, code="too_many_requests", headers={"retry-after": wait})

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        allowed = self.settings.allowed_hosts
        if b"host" not in headers or "*" in allowed or not (self._local or allowed):
            return
        name = host_name(headers[b"host"].decode("latin-1"))
        if name not in allowed and not (self._local and is_loopback(name)):
            message = f"this server is not {name!r}; --allow-host lets it answer to that name"
            raise ApiError(403, message, code="host_not_allowed")

    def _namespace(self, headers: dict[bytes, bytes]) -> str:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        found = None
        for key, namespace in self._namespaces.items():  # all of them, whichever fits
            if hmac.compare_digest(key.encode(), given.strip()) and scheme.lower() == b"bearer":
                found = namespace
        if found is None:
            raise ApiError(401, "this server asks for an API key", code="invalid_api_key")
        return found

    def _ended(self, visit: RequestScope) -> None:
        path = visit.scope["path"]
        if (count := visit.scope["state"].get("count")) is not None:
            count()
        route = visit.scope.get("route")
        known = getattr(route, "path", None) or ("other" if visit.status == 404 else path)
        if visit.status in (401, 403, 413, 429, 503) and route is None:
            known = "refused"
        self.metrics.requests.labels(known, str(visit.status or 499)).inc()
        logs.event(
            "request",
            id=visit.id,
            method=visit.scope["method"],
            path=path,
            status=visit.status or 499,
            ms=round(visit.seconds * 1e3, 2),
            tenant=visit.scope["state"]["namespace"],
            **visit.scope["state"].get("facts", {}),
        )
        if self.telemetry is not None:
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in visit.scope["headers"]}
            self.telemetry.record(
                method=visit.scope["method"],
                path=path,
                status=visit.status or 499,
                headers=headers,
                began=visit.began,
                ended=time_ns(),
                facts=visit.scope["state"].get("facts", {}),
            )


def host_name(host: str) -> str:
    """The name in a Host header, without its port: `[::1]:80` is `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


@lru_cache(256)  # every request asks, nearly always for the same name
def is_loopback(name: str) -> bool:
    """Whether a name or address stands for this machine alone."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


class RequestScope:
    """One request on its way through the gate."""

    def __init__(self, gate: AdmissionMiddleware, scope: Message, receive: Any, send: Any) -> None:
        self.scope = scope
        self.id = token_hex(16)
        self.status = 0
        self._limit = self._left = gate.settings.max_body
        self._receive = receive
        self._send = send
        self._began = perf_counter()
        self.began = time_ns()

    @property
    def seconds(self) -> float:
        return perf_counter() - self._began

    async def receive(self) -> Message:
        """The next part of the body. Raises `TooLarge`."""
        message: Message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise TooLarge(self._limit)
        return message

    async def send(self, message: Message) -> None:
        """Pass an answer on, with the request's id in its head."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", []), (b"x-request-id", self.id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error without asking anybody."""
        body = error.to_json()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **error.headers,
        }
        if error.status == 413:
            headers["connection"] = "close"
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": pairs})
        await self.send({"type": "http.response.body", "body": body})
