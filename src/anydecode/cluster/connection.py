"""Authenticated connections between the processes of a fleet: frames over TCP.

Both sides prove that they know the fleet's secret (HMAC-SHA256 over random challenges) before
anything else is read. Each frame has a tag over its content, its direction and its number, so that
a frame that was changed, repeated or cut ends the connection. Frames are JSON with bytes behind it;
sizes are checked before memory is allocated. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import socket
import struct
from typing import Any

from anydecode.cluster.ledger import Frame
from anydecode.errors import FleetError

#: The protocol's version, part of the first bytes of every connection.
VERSION = 1
_MAGIC = b"anydecode fleet %d\n" % VERSION
_CHALLENGE_BYTES = 32
_TAG_BYTES = 32
#: Sizes of a frame's JSON and of the bytes behind it.
_SIZES = struct.Struct("<II")
#: Maximum size of the JSON of a frame, in bytes.
MAX_JSON_BYTES = 32 << 20
#: Maximum size of the bytes behind it.
MAX_PAYLOAD_BYTES = 16 << 20
#: Maximum size of what waits to be sent. A peer that reads so slowly is cut off.
MAX_UNSENT_BYTES = 256 << 20
#: How long a handshake may take, in seconds.
HANDSHAKE_SECONDS = 10.0


def host_and_port(address: str) -> tuple[str, int] | None:
    """Host and port of `HOST:PORT`; None if the address has another form."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        return None
    return host.strip("[]"), int(port)


class FleetConnectionError(FleetError):
    """A connection was refused, broke, or carried something that is no frame."""


class Connection:
    """An authenticated connection. `Connection.open` and `Connection.accept` make one."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        keys: tuple[bytes, bytes],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._send_key, self._receive_key = keys
        self._num_sent = self._num_received = 0

    @classmethod
    async def open(cls, host: str, port: int, secret: bytes) -> Connection:
        """Connect to a process of the fleet.

        Raises:
            FleetConnectionError: Nobody listens there, or the other side is no process of this
                fleet.
        """
        where = f"{host}:{port}"
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(host, port), HANDSHAKE_SECONDS
            )
        except (OSError, asyncio.TimeoutError):
            raise FleetConnectionError(
                f"nobody answers at {where}: start its process, or give another address"
            ) from None
        return await cls._authenticated(reader, writer, secret, where, is_server=False)

    @classmethod
    async def accept(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
    ) -> Connection:
        """The connection of a process that has connected to this one.

        Raises:
            FleetConnectionError: It does not know the secret, or speaks another protocol.
        """
        where = "a process that has connected"
        return await cls._authenticated(reader, writer, secret, where, is_server=True)

    @classmethod
    async def _authenticated(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        secret: bytes,
        where: str,
        *,
        is_server: bool,
    ) -> Connection:
        try:
            return await asyncio.wait_for(
                cls._handshake(reader, writer, secret, where, is_server=is_server),
                HANDSHAKE_SECONDS,
            )
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            writer.close()
            raise FleetConnectionError(
                f"{where} does not answer as a fleet with this secret and protocol {VERSION}"
            ) from None
        except BaseException:
            writer.close()
            raise

    @classmethod
    async def _handshake(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        secret: bytes,
        where: str,
        *,
        is_server: bool,
    ) -> Connection:
        connection = writer.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = os.urandom(_CHALLENGE_BYTES)
        writer.write(_MAGIC + own)
        greeting = await reader.readexactly(len(_MAGIC) + _CHALLENGE_BYTES)
        other = greeting[len(_MAGIC) :]
        if greeting[: len(_MAGIC)] != _MAGIC or other == own:
            raise FleetConnectionError(
                f"{where} does not speak protocol {VERSION} of fleets: use the same version of"
                " anydecode everywhere"
            )
        challenges = other + own if is_server else own + other  # the client's first
        sides = (b"server", b"client") if is_server else (b"client", b"server")
        own_proof, other_proof = (_mac(secret, b"proof", side, challenges) for side in sides)
        writer.write(own_proof)
        if not hmac.compare_digest(await reader.readexactly(_TAG_BYTES), other_proof):
            raise FleetConnectionError(f"{where} has another secret; give both the same file")
        send, receive = (_mac(secret, b"frames", side, challenges) for side in sides)
        return cls(reader, writer, (send, receive))

    @property
    def host(self) -> str:
        """The address of the other side."""
        return str(self._writer.get_extra_info("peername")[0])

    @property
    def own_host(self) -> str:
        """The address of this side."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, frame: Frame, payload: bytes = b"") -> None:
        """Send a frame; it is written when the other side reads.

        Raises:
            FleetConnectionError: The frame is too large, or the other side reads too slowly.
        """
        text = json.dumps(frame, separators=(",", ":")).encode()
        if len(text) > MAX_JSON_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
            raise FleetConnectionError(
                f"a frame has {len(text)} bytes of JSON and {len(payload)} others; allowed are"
                f" {MAX_JSON_BYTES} and {MAX_PAYLOAD_BYTES}"
            )
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close()
            raise FleetConnectionError("the other side does not read what it is sent")
        sizes = _SIZES.pack(len(text), len(payload))
        tag = _mac(self._send_key, self._num_sent.to_bytes(8, "little"), sizes, text, payload)
        self._num_sent += 1
        self._writer.write(sizes + text + payload + tag)

    async def drained(self) -> None:
        """Wait until most of what was sent is written."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise FleetConnectionError(f"the connection broke: {error}") from None

    async def receive(self) -> tuple[Frame, bytes]:
        """The next frame.

        Raises:
            FleetConnectionError: The connection has ended, or carries something that is no frame.
        """
        try:
            sizes = await self._reader.readexactly(_SIZES.size)
            num_text, num_payload = _SIZES.unpack(sizes)
            if num_text > MAX_JSON_BYTES or num_payload > MAX_PAYLOAD_BYTES:
                raise FleetConnectionError("a frame is larger than allowed")
            text = await self._reader.readexactly(num_text)
            payload = await self._reader.readexactly(num_payload)
            tag = await self._reader.readexactly(_TAG_BYTES)
        except (OSError, asyncio.IncompleteReadError):
            raise FleetConnectionError("the connection has ended") from None
        number = self._num_received.to_bytes(8, "little")
        self._num_received += 1
        if not hmac.compare_digest(tag, _mac(self._receive_key, number, sizes, text, payload)):
            raise FleetConnectionError("a frame was changed on its way")
        try:
            frame: Any = json.loads(text)
        except (ValueError, RecursionError):
            raise FleetConnectionError("a frame is not JSON") from None
        return frame, payload

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


def _mac(key: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(part)
    return mac.digest()
