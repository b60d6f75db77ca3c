"""Attention and FFNs of one model in two processes, which exchange hidden states per layer.

The attention process has the cache, the embedding, the attention and the head. The FFN process has
the FFNs and no state: a pass that it did not finish runs again with another one.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import secrets
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from anydecode.cluster.connection import Connection, FleetConnectionError
from anydecode.cluster.launcher import start_process
from anydecode.cluster.ledger import Frame
from anydecode.errors import FleetError, UnsupportedCombinationError
from anydecode.kernels.host import to_host
from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.models.ffn_split import (
    attention_part,
    check_split,
    ffn_digest,
    ffn_part,
    free_ffns,
    micro_batches,
    state_rows,
)
from anydecode.models.network import Network
from anydecode.models.transformer import Executor
from anydecode.server.event_loop import EventLoopThread
from anydecode.version import __version__

#: Maximum size of the hidden states of one frame, in bytes.
MAX_FRAME_BYTES = 8 << 20
#: How long an FFN process may take for one micro-batch, in seconds.
ANSWER_SECONDS = 60.0
#: How long an FFN process of this machine may take to load its model, in seconds.
START_SECONDS = 600.0
#: How often a pass is tried with a new FFN process.
MAX_RETRIES = 3
#: The line that an FFN process writes when it can be reached starts with this.
READY = "FFN process at "

Make = Callable[[Network], Executor]


def _facts(executor: Any, digest: str) -> dict[str, Any]:
    """What both processes must have in common for equal bits."""
    return {
        "version": __version__,
        "backend": type(executor).__name__,
        "kernels": executor.kernels,
        "model": digest,
    }


class FfnServer:
    """Computes the FFNs of a model for attention processes.

    Args:
        network: The model; only its FFNs are kept.
        make: Makes an executor.
        secret: The secret that both processes share.
        name: The model's name, for messages.

    Raises:
        UnsupportedCombinationError: The model cannot be split.
    """

    def __init__(self, network: Network, make: Make, secret: bytes, name: str) -> None:
        check_split(network.spec, name)
        self._secret, part = secret, ffn_part(network)
        digest = ffn_digest(network)
        self._executor: Any = make(part)
        self._facts = _facts(self._executor, digest)
        self._hidden, self._num_layers = part.spec.hidden_size, part.spec.num_layers
        shapes = [None] * self._num_layers
        self._cache = self._executor.new_cache(self._executor.cache_format, 1, shapes)

    async def serve(
        self, host: str, port: int, ready: Callable[[int], None], *, is_single: bool = False
    ) -> None:
        """Accept connections.

        Args:
            host: The address to listen on.
            port: The port; 0: a free one.
            ready: Called with the port.
            is_single: Whether to return when a connection has ended.
        """
        has_ended = asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(FleetConnectionError):
                connection = await Connection.accept(reader, writer, self._secret)
                try:
                    await self._answer(connection)
                finally:
                    connection.close()
                    has_ended.set()

        try:
            server = await asyncio.start_server(accept, host, port)
        except OSError as error:
            raise FleetError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        async with server:
            ready(server.sockets[0].getsockname()[1])
            if is_single:
                await has_ended.wait()
            else:
                await server.serve_forever()

    async def _answer(self, connection: Connection) -> None:
        hello, _ = await connection.receive()
        given = hello.get("facts") if isinstance(hello, dict) else None
        different = [
            name for name, own in self._facts.items()
            if not isinstance(given, dict) or given.get(name) != own
        ]  # fmt: skip
        connection.send({"different": different, "cache_format": self._executor.cache_format})
        await connection.drained()
        while not different:
            frame, payload = await connection.receive()
            layer = frame.get("layer") if isinstance(frame, dict) else None
            if type(layer) is not int or not 0 <= layer < self._num_layers:
                raise FleetConnectionError(f"layer is {layer!r}; there are {self._num_layers}")
            if not payload or len(payload) % (4 * self._hidden):
                raise FleetConnectionError(f"a frame has {len(payload)} bytes of hidden states")
            x = np.frombuffer(payload, np.float32).reshape(-1, self._hidden)
            connection.send({"layer": layer}, self.compute(x, layer).tobytes())
            await connection.drained()

    def compute(self, x: np.ndarray, layer: int) -> np.ndarray:
        """The hidden states after `layer` from those after its attention, float32
        `[rows, hidden_size]`."""
        self._executor.begin(state_rows(len(x)), self._cache)
        active = np.arange(len(x))
        return np.ascontiguousarray(to_host(self._executor.layers(x, active, layer, layer + 1)))


class FfnClient:
    """The connection of an attention process to an FFN process. One thread uses it; another one
    reads and writes the network meanwhile.

    Args:
        locate: Host, port and secret of an FFN process; starts one if need be.
        facts: What both processes must have in common.
        hidden: The hidden size.
    """

    def __init__(
        self, locate: Callable[[], tuple[str, int, bytes]], facts: dict[str, Any], hidden: int
    ) -> None:
        self._locate, self._facts, self._hidden = locate, facts, hidden
        self._rows_per_frame = max(1, MAX_FRAME_BYTES // (4 * hidden))
        self._events = EventLoopThread("anydecode-ffn")
        self._connection: Connection | None = None
        atexit.register(self.close)  # of models that nobody closes

    def connect(self) -> str:
        """Connect to an FFN process, a new one after the first time.

        Returns:
            The format of the cache that this process prefers.

        Raises:
            FleetError: None answers, or it has another model or build.
        """
        self._drop()
        host, port, secret = self._locate()
        # Those of the connection: late entries of one that broke are not those of the next.
        self._results: queue.SimpleQueue[tuple[Frame, bytes] | FleetConnectionError]
        self._results = queue.SimpleQueue()
        self._connection = self._events.run(self._open(host, port, secret))
        self._send({"facts": self._facts}, b"")
        welcome, _ = self._next()
        if welcome["different"]:
            names = " and ".join(welcome["different"])
            raise FleetError(
                f"the FFN process at {host}:{port} has another {names}: start it with this model,"
                " format, version and build of anydecode"
            )
        return str(welcome["cache_format"])

    async def _open(self, host: str, port: int, secret: bytes) -> Connection:
        connection = await Connection.open(host, port, secret)
        self._reader = asyncio.ensure_future(self._read(connection, self._results))
        return connection

    @staticmethod
    async def _read(connection: Connection, results: queue.SimpleQueue[Any]) -> None:
        try:
            while True:
                results.put(await connection.receive())
        except FleetConnectionError as error:
            results.put(error)

    def send(self, layer: int, x: np.ndarray) -> None:
        """Send the hidden states of a micro-batch after the attention of `layer`."""
        for start in range(0, len(x), self._rows_per_frame):
            part = x[start : start + self._rows_per_frame]
            self._send({"layer": layer}, np.ascontiguousarray(part, np.float32).tobytes())

    def _send(self, frame: Frame, payload: bytes) -> None:
        connection, results = self._connection, self._results
        if connection is None:  # the last attempt to connect has failed
            raise FleetConnectionError("there is no FFN process")

        def write() -> None:
            try:
                connection.send(frame, payload)
            except FleetConnectionError as error:
                results.put(error)

        self._events.loop.call_soon_threadsafe(write)

    def receive(self, layer: int, count: int) -> np.ndarray:
        """The hidden states after `layer` of the oldest micro-batch that was sent and not received,
        float32 `[count, hidden_size]`.

        Raises:
            FleetConnectionError: The connection broke, or the process does not answer.
        """
        parts, num_left = [], count
        while num_left > 0:
            frame, payload = self._next()
            part = np.frombuffer(payload, np.float32).reshape(-1, self._hidden)
            num_left -= len(part)
            if frame.get("layer") != layer or not len(part) or num_left < 0:
                raise FleetConnectionError("the FFN process has answered out of order")
            parts.append(part)
        return np.concatenate(parts)

    def _next(self) -> tuple[Frame, bytes]:
        try:
            result = self._results.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise FleetConnectionError("the FFN process does not answer") from None
        if isinstance(result, FleetConnectionError):
            raise result
        return result

    def _drop(self) -> None:
        if self._connection is not None:
            self._events.run(self._end(self._connection))
            self._connection = None

    async def _end(self, connection: Connection) -> None:
        connection.close()
        self._reader.cancel()
        await asyncio.wait([self._reader])

    def close(self) -> None:
        """End the connection."""
        atexit.unregister(self.close)
        if self._events.is_running:
            self._drop()
            self._events.close()


class AttentionExecutor:
    """Runs a model's passes, of which an FFN process computes the FFNs.

    The rows of a pass are divided into micro-batches. While the FFN process computes one of them,
    the attention of the next one runs here. No row's bits depend on where it is computed, or with
    which others.

    Args:
        network: The model; its FFNs are freed.
        make: Makes an executor.
        connect: Makes the connection to an FFN process from the facts and the hidden size.
        count: The largest number of micro-batches.

    Raises:
        UnsupportedCombinationError: The model cannot be split.
        FleetError: No FFN process answers, or it has another model or build.
    """

    takes_adapters = False  # the FFN process lacks them

    def __init__(
        self,
        network: Network,
        make: Make,
        connect: Callable[[dict[str, Any], int], FfnClient],
        count: int,
    ) -> None:
        check_split(network.spec, network.spec.architecture)
        digest = ffn_digest(network)
        inner: Any = make(attention_part(network))
        if str(getattr(inner, "device", "cpu")) != "cpu":
            raise UnsupportedCombinationError("step-3 works on CPUs only")
        free_ffns(network)
        self._inner, self._count = inner, count
        self._ffn = connect(_facts(inner, digest), network.spec.hidden_size)
        formats = {inner.cache_format, self._ffn.connect()}
        # That of one process: with quantised FFNs, too, the cache is in half precision.
        self.cache_format = "float16" if "float16" in formats else inner.cache_format
        self.cache_formats = inner.cache_formats
        self.threads, self.kernels = getattr(inner, "threads", 1), inner.kernels
        self.new_cache, self.embed, self.head = inner.new_cache, inner.embed, inner.head
        for name in ("read_rows", "linear"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """Run a pass, again with another FFN process if one is lost.

        Raises:
            FleetError: No FFN process answers.
        """
        for _ in range(MAX_RETRIES):
            try:
                return self._run(rows, cache, output_spec)
            except FleetConnectionError:
                self._ffn.connect()
        return self._run(rows, cache, output_spec)

    def _run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        x = self._inputs(rows)
        hidden: dict[int, np.ndarray] = {}
        self._inner.begin(rows, cache)
        bounds = sorted({*rows.start.tolist(), *rows.stop.tolist(), *output_spec.hidden})
        for first, last in zip(bounds, [*bounds[1:], None], strict=True):
            if first in output_spec.hidden:
                hidden[first] = x[output_spec.hidden[first]]
            if last is not None:
                active = np.flatnonzero((rows.start <= first) & (rows.stop >= last))
                if len(active):
                    groups = micro_batches(rows, active, self._count, cache.num_slots)
                    self._run_layers(x, groups, first, last)
        return Output(to_host(self._inner.head(x[output_spec.logits])), hidden)

    def _inputs(self, rows: Rows) -> np.ndarray:
        has_token = rows.tokens >= 0
        embedded = to_host(self._inner.embed(rows.tokens[has_token]))
        x = np.empty((len(rows), embedded.shape[1]), np.float32)
        if rows.inputs is not None:
            x[:] = to_host(rows.inputs)
        x[has_token] = embedded
        return x

    def _run_layers(self, x: np.ndarray, groups: list[np.ndarray], first: int, last: int) -> None:
        """Run the layers `[first, last)` of micro-batches, and put their states into x."""
        for layer in range(first, last):
            for group in groups:
                if layer > first:
                    x[group] = self._ffn.receive(layer - 1, len(group))
                states = self._inner.layers(x[group], group, layer, layer + 1)
                self._ffn.send(layer, to_host(states))
        for group in groups:
            x[group] = self._ffn.receive(last - 1, len(group))


class LocalFfn:
    """FFN processes of this machine, which end with the connection of this one.

    Args:
        arguments: The arguments of `anydecode cluster ffn`.
    """

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None

    def __call__(self) -> tuple[str, int, bytes]:
        """Start a process: its host, its port and the secret.

        Raises:
            FleetError: It could not be started.
        """
        self.close()
        secret = secrets.token_hex(32)
        arguments = ["ffn", *self._arguments, "--port", "0", "--single"]
        self._process = start_process(arguments, secret, has_output=True)
        assert self._process.stdout is not None
        last = "it wrote nothing"
        for line in self._process.stdout:
            if line.startswith(READY):
                return "127.0.0.1", int(line.rpartition(":")[2]), secret.encode()
            last = line.strip() or last
        self.close()
        raise FleetError(f"the FFN process has ended: {last}")

    @property
    def process_id(self) -> int | None:
        """The id of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None
