"""Connections of a fleet: who is let in, and what ends them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from anydecode.cluster import connection as connection_module
from anydecode.cluster.connection import Connection, FleetConnectionError
from anydecode.cluster.secret import VARIABLE, read_secret
from anydecode.errors import InvalidRequestError

SECRET = b"a secret of the tests"
Serve = Callable[[Connection], Awaitable[None]]


async def _exchange(client: Callable[[int], Awaitable[Any]], serve: Serve) -> list[str]:
    """Run a server and a client; returns the errors of the server's side."""
    refused = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(await Connection.accept(reader, writer, SECRET))
        except FleetConnectionError as error:
            refused.append(str(error))
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        await client(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        await asyncio.sleep(0.05)
    return refused


async def _echo(connection: Connection) -> None:
    while True:
        connection.send(*await connection.receive())


def test_frames_and_bytes_arrive_as_they_were_sent() -> None:
    frames = [({"type": "a", "value": [1, 0.1, None, "ü"]}, b""), ({"type": "b"}, b"\0" * 100_000)]

    async def client(port: int) -> None:
        connection = await Connection.open("127.0.0.1", port, SECRET)
        for frame in frames:
            connection.send(*frame)
        assert [await connection.receive() for _ in frames] == frames
        connection.close()

    asyncio.run(_exchange(client, _echo))


def test_another_secret_is_refused_on_both_sides() -> None:
    async def client(port: int) -> None:
        with pytest.raises(FleetConnectionError, match="another secret|with this secret"):
            await Connection.open("127.0.0.1", port, b"another secret")

    refused = asyncio.run(_exchange(client, _echo))
    assert len(refused) == 1 and "secret" in refused[0]


def test_nobody_answers() -> None:
    async def client(port: int) -> None:
        return None

    async def absent() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        await Connection.open("127.0.0.1", port, SECRET)

    with pytest.raises(FleetConnectionError, match="nobody answers at 127.0.0.1"):
        asyncio.run(absent())


@pytest.mark.parametrize(
    "first_bytes",
    [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, b"anydecode fleet 999\n" + b"x" * 60, b""],
)
def test_other_protocols_are_refused(first_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_SECONDS", 0.2)

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first_bytes)
        await reader.read()
        writer.close()

    refused = asyncio.run(_exchange(client, _echo))
    assert len(refused) == 1 and "protocol" in refused[0]


def test_a_proof_cannot_be_sent_back() -> None:
    """A client without the secret repeats what the server sends."""

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    assert len(asyncio.run(_exchange(client, _echo))) == 1


def _changed(data: bytes) -> bytes:
    return data[:10] + bytes([data[10] ^ 1]) + data[11:]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_changed, "changed on its way"),
        (lambda data: data + data, "changed on its way"),
        (lambda data: data[:-1], "has ended"),
        (lambda data: b"\xff" * 8, "larger than allowed"),
    ],
    ids=["a bit", "twice", "cut", "too large"],
)
def test_spoiled_frames_end_the_connection(spoil: Callable[[bytes], bytes], message: str) -> None:
    reasons = []

    async def serve(connection: Connection) -> None:
        try:
            for _ in range(2):
                await connection.receive()
        except FleetConnectionError as error:
            reasons.append(str(error))

    async def client(port: int) -> None:
        connection = await Connection.open("127.0.0.1", port, SECRET)
        writer = connection._writer
        written: list[bytes] = []
        write = writer.write
        writer.write = written.append  # type: ignore[method-assign, assignment]
        connection.send({"type": "a", "text": "some text"})
        write(spoil(b"".join(written)))
        await writer.drain()
        connection.close()

    asyncio.run(_exchange(client, serve))
    assert len(reasons) == 1 and message in reasons[0]


def test_too_large_frames_are_not_sent() -> None:
    async def client(port: int) -> None:
        connection = await Connection.open("127.0.0.1", port, SECRET)
        with pytest.raises(FleetConnectionError, match="allowed are"):
            connection.send({"type": "a"}, b"\0" * (connection_module.MAX_PAYLOAD_BYTES + 1))
        connection.close()

    asyncio.run(_exchange(client, _echo))


def test_a_secret_is_made_once_and_only_its_owner_can_read_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    file = tmp_path / "folder" / "secret"
    with pytest.raises(InvalidRequestError, match="there is no secret"):
        read_secret(file)
    secret = read_secret(file, can_create=True)
    assert len(secret) == 64 and read_secret(file) == secret
    assert sys.platform == "win32" or file.stat().st_mode & 0o077 == 0
    file.write_text("short")
    with pytest.raises(InvalidRequestError, match="use 16 or more"):
        read_secret(file)
    monkeypatch.setenv(VARIABLE, "the secret of the environment")
    monkeypatch.setenv("ANYDECODE_HOME", str(tmp_path))
    assert read_secret(None) == b"the secret of the environment"
