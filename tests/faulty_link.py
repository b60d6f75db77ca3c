"""A relay between two processes that loses, cuts and changes what they send."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable

#: What becomes of bytes on their way, and whether the connections go on after them.
Fault = Callable[[bytes], tuple[bytes, bool]]


class FaultyLink:
    """Forwards each connection to `port` to another port of this machine.

    Args:
        target: That port.

    Attributes:
        port: The port to connect to.
        to_target: The fault of what goes to the target; None: there is none.
        from_target: The fault of what comes from it.
    """

    def __init__(self, target: int) -> None:
        self.to_target: Fault | None = None
        self.from_target: Fault | None = None
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def repair(self) -> None:
        """Let the connections that come work; those that are there end."""
        for one in self._sockets:
            _reset(one)
        self.to_target = self.from_target = None

    def close(self) -> None:
        """End all connections."""
        self._listener.close()
        self.repair()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._sockets += [near, far]
            for arguments in ((near, far, "to_target"), (far, near, "from_target")):
                threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        try:
            while data := source.recv(1 << 16):
                fault: Fault | None = getattr(self, name)
                sent, goes_on = (data, True) if fault is None else fault(data)
                sink.sendall(sent)
                if not goes_on:
                    break
        except OSError:
            pass
        for one in (source, sink):
            _reset(one)


def _reset(one: socket.socket) -> None:
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    one.close()


def lost(data: bytes) -> tuple[bytes, bool]:
    """Nothing arrives, and nobody is told: a half-open connection."""
    return b"", True


def truncated(data: bytes) -> tuple[bytes, bool]:
    """Half of it arrives, then the connection ends."""
    return data[: len(data) // 2], False


def changed(data: bytes) -> tuple[bytes, bool]:
    """The last bit is another one."""
    return data[:-1] + bytes([data[-1] ^ 1]), True
