"""Requests over a socket that never end, and those that are too large."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from uvicorn import Config  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.server import admission  # noqa: E402
from anydecode.server.admission import Pace  # noqa: E402
from anydecode.server.connection import LimitedProtocol  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402
from server_client import Client, served  # noqa: E402

BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n" % len(BODY)
)


@pytest.fixture
def llm() -> Iterator[Any]:
    with scripted_llm() as llm:
        yield llm


def connect(client: Client) -> socket.socket:
    url = client.http.base_url
    return socket.create_connection((url.host, url.port), timeout=30)


def received(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionError:  # it closed the connection without reading everything
        pass
    return b"".join(parts)


def status(connection: socket.socket) -> int:
    return int(received(connection).split(b" ", 2)[1])


@pytest.mark.parametrize(
    "head",
    [
        b"GET /",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ",
        b"POST /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1;x=",
        b"POST /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ",
    ],
    ids=["path", "header", "chunk", "trailer"],
)
def test_a_line_without_end_is_not_read_to_its_end(llm: Any, head: bytes) -> None:
    num_sent, total = 0, 48 << 20
    with served(llm) as client, connect(client) as connection:
        connection.sendall(head)
        with pytest.raises(ConnectionError):
            while num_sent < total:
                num_sent += connection.send(b"a" * (1 << 16))
        assert client.http.get("/health").status_code == 200
    assert num_sent < total


def test_a_header_that_is_too_large_is_a_431(llm: Any) -> None:
    with served(llm, max_header=4096) as client, connect(client) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 4096)
        answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 431 ")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["message"] == "the request's headers are larger than 4096 bytes"


@pytest.mark.parametrize("size, expected", [(100, 200), (1000, 431)])
def test_the_size_of_all_headers_counts(llm: Any, size: int, expected: int) -> None:
    headers = {f"x-{number}": "a" * size for number in range(8)}
    with served(llm, max_header=4096) as client:
        for _ in range(5):  # on one connection
            answer = client.http.get("/health", headers=headers)
            assert answer.status_code == expected
        assert client.http.get("/health?" + "a" * 5000).status_code == 431
        assert client.http.get("/health").status_code == 200


def test_headers_and_bodies_that_do_not_end_are_refused(llm: Any) -> None:
    with served(llm, body_seconds=0.2) as client, ExitStack() as stack:
        for start in (b"", HEAD, HEAD + b"\r\n", HEAD + b"\r\n" + BODY[:-1]):
            connection = stack.enter_context(connect(client))
            connection.sendall(start)
            assert status(connection) == 408
        assert client.ask("/v1/completions")["choices"]


def test_unfinished_bodies_take_no_places(llm: Any) -> None:
    with served(llm, max_requests=2) as client, ExitStack() as stack:
        slow = [stack.enter_context(connect(client)) for _ in range(8)]
        for connection in slow:
            connection.sendall(HEAD + b"connection: close\r\n\r\n" + BODY[:-1])
            assert client.ask("/v1/completions")["choices"]
        # Of the bodies that are being sent, the last `max_requests` are kept.
        for connection in slow[:6]:
            assert status(connection) == 408
        for connection in slow[6:]:
            connection.sendall(BODY[-1:])
            assert status(connection) == 200


def test_a_client_that_leaves_while_it_sends_leaves_nothing(llm: Any) -> None:
    with served(llm, max_requests=1) as client:
        for _ in range(3):
            with connect(client) as connection:
                connection.sendall(HEAD + b"\r\n" + BODY[:-1])
            assert client.ask("/v1/completions")["choices"]
        assert 'endpoint="refused",status="408"' not in client.http.get("/metrics").text


def test_unknown_paths_are_one_label(llm: Any) -> None:
    with served(llm, max_header=4096) as client:
        for number in range(5):
            assert client.http.get(f"/none/{number}").status_code == 404
            assert client.http.post(f"/v1/none/{number}", json={}).status_code == 404
            assert client.http.delete(f"/page/{number}").status_code == 405
            assert client.http.get(f"/none/{number}?{'a' * 5000}").status_code == 431
        text = client.http.get("/metrics").text
    labels = {
        line.split('endpoint="')[1].split('"')[0]
        for line in text.splitlines()
        if line.startswith("anydecode_requests_total{")
    }
    assert labels <= {"other", "refused", "/page/{name}", "/metrics"} and "other" in labels


def test_large_bodies_are_received_at_a_limited_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of several bodies together, and small ones at once."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(admission.asyncio, "sleep", sleep)
    pace = Pace(1000.0)

    async def receive() -> None:
        for _ in range(4):
            await pace.wait(500)

    async def both() -> None:
        await asyncio.gather(receive(), receive())

    asyncio.run(both())
    assert len(waits) == 8 and 3.9 < waits[-1] <= 4.0
    asyncio.run(Pace(1e9).wait(1000))
    assert len(waits) == 8


@pytest.mark.parametrize("num_requests", [1, 3], ids=["one", "pipelined"])
def test_a_client_that_reads_no_answer_is_disconnected(
    llm: Any, monkeypatch: pytest.MonkeyPatch, num_requests: int
) -> None:
    """A socket that is only closed would stay open until its buffer is read, and a request behind
    the answer on the same connection would wait for ever."""
    connection_made = LimitedProtocol.connection_made

    def with_small_buffer(protocol: LimitedProtocol, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection_made(protocol, transport)

    monkeypatch.setattr(LimitedProtocol, "connection_made", with_small_buffer)
    with served(llm, stall_seconds=0.1) as client, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((client.http.base_url.host, client.http.base_url.port))
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * num_requests)
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                time.sleep(0.01)
                connection.send(b"\r\n")


class Loop:
    """An event loop of which a test calls the last timer."""

    def call_later(self, seconds: float, callback: Any, *arguments: Any) -> Any:
        self.timer = SimpleNamespace(cancel=lambda: None, run=lambda: callback(*arguments))
        return self.timer


class Transport:
    """A transport with a buffer of a set size."""

    size = 0
    is_aborted = False

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.size

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize(
    "sizes, is_complete, is_aborted",
    [
        ((900, 800, 700), True, False),  # it reads slowly
        ((900, 900), True, True),
        ((900, 950), True, True),
        ((900, 950), False, False),  # what it reads is replaced by more of the answer
    ],
)
def test_a_client_that_reads_slowly_stays_connected(
    sizes: tuple[int, ...], is_complete: bool, is_aborted: bool
) -> None:
    app = SimpleNamespace(settings=Settings())
    loop, transport = Loop(), Transport()
    protocol = LimitedProtocol(Config(app), ServerState(), {}, loop)
    protocol.connection_made(transport)
    protocol.cycle = SimpleNamespace(response_complete=is_complete)
    transport.size = sizes[0]
    protocol.on_response_complete()
    for size in sizes[1:]:
        transport.size = size
        loop.timer.run()
    assert transport.is_aborted == is_aborted


def test_what_is_not_http_is_refused_in_json(llm: Any) -> None:
    with served(llm) as client, connect(client) as connection:
        connection.sendall(b"\x16\x03\x01 TLS\r\n\r\n")
        head, _, content = received(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
    error = json.loads(content)["error"]
    assert error["message"] == "the request is not valid HTTP/1.1"
