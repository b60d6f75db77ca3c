"""Worker processes that try expensive work of requests first, under limits of time and memory.

Compiling a constraint, rendering a chat template and tokenising a long prompt can take hours or all
memory for a hostile request. They run in a process that is ended at the limit, so that neither the
engine nor the event loop waits for them. Clients take turns, and one client never occupies all
processes.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import pickle
import signal
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import anydecode
from anydecode.server.errors import ApiError
from anydecode.server.event_loop import EventLoopThread
from anydecode.server.jobs import Limits
from anydecode.server.logs import log
from anydecode.server.worker import LENGTH, Outcome

#: Number of processes. A client has at most all but one: two, so that its requests go on beside one
#: that takes long (all users behind one address are a client, where there are no keys).
NUM_WORKERS = 3
#: A job may take so many times its processor time, as its process waits for a busy machine. The
#: same is the longest wait of a request for its turn.
PATIENCE = 10
#: Seconds in which a process must have started and loaded a tokenizer.
_START_SECONDS = 120.0
#: Maximum number of objects that a process keeps loaded.
_MAX_LOADED = 8
#: Signals by which the system ends a process at its limit of processor time.
_TIME_SIGNALS = frozenset(
    -getattr(signal, name) for name in ("SIGPROF", "SIGXCPU") if hasattr(signal, name)
)


class LimitError(ApiError):
    """The work that a request asks for passes a limit of the server."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(400, f"{what} {reason}", code="limit_exceeded")


class _WorkerDeathError(Exception):
    """A worker process ended during a job with the exit code `code`, for no limit of the job: it
    crashed, or something outside killed it."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Turns:
    """Access to `num_slots` slots, in turns by client. A client has at most all slots but one, and
    waits for at most `seconds`. Used on one event loop."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._max_per_client = max(1, num_slots - 1)
        self._num_used: dict[Hashable, int] = {}
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, client: Hashable, seconds: float) -> None:
        """Take a slot. Raises `ApiError` (429) if none becomes free in time."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._advance()
        try:
            await asyncio.wait([turn], timeout=seconds)
        except asyncio.CancelledError:
            self.release(client) if turn.done() else self._leave(client, turn)
            raise
        if not turn.done():
            self._leave(client, turn)
            wait = str(max(1, round(seconds)))
            raise ApiError(
                429,
                f"other requests of this client were still being prepared after {wait} s; send"
                " fewer at once, or try again",
                code="too_many_requests",
                headers={"retry-after": wait},
            )

    def release(self, client: Hashable) -> None:
        """Give a slot back."""
        self._num_free += 1
        self._num_used[client] -= 1
        if not self._num_used[client]:
            del self._num_used[client]
        self._advance()

    def _leave(self, client: Hashable, turn: asyncio.Future[None]) -> None:
        self._waiting[client].remove(turn)
        if not self._waiting[client]:
            del self._waiting[client]

    def _advance(self) -> None:
        """Gives the free slots to those whose turn it is."""
        for client in list(self._waiting):
            if not self._num_free:
                return
            if self._num_used.get(client, 0) >= self._max_per_client:
                continue
            turn = self._waiting[client].popleft()
            if self._waiting[client]:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            self._num_free -= 1
            self._num_used[client] = self._num_used.get(client, 0) + 1
            turn.set_result(None)


class _Worker:
    """One process, started on first use."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self._loaded: set[str] = set()
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the process if it is not running."""
        async with self._starting:
            if self.process is None or self.process.returncode is not None:
                self.process = await self._started()

    async def _started(self) -> asyncio.subprocess.Process:
        root = str(Path(anydecode.__file__).parent.parent)
        paths = [root, *(os.path.abspath(path) for path in sys.path if path)]
        self._loaded = set()
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "anydecode.server.worker",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, start_new_session=True,
            env={
                **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
            },
        )  # fmt: skip

    async def run(self, key: str, payload: bytes, message: bytes, limits: Limits, what: str) -> Any:
        """Run a job that uses the object `key`, whose pickle `payload` is loaded first. If the
        process ends for no limit of the job, the job runs once more, in another process."""
        for following in ("it runs again in another process", "its request fails"):
            try:
                return await self._run_once(key, payload, message, limits, what)
            except _WorkerDeathError as death:
                log.error(
                    "a worker process ended with code %s during a job; %s", death.code, following
                )
        raise ApiError(
            503,
            f"{what} could not be prepared: two worker processes of the server ended while they"
            " worked on it, for no limit of the request; try again, or see the server's log",
            code="worker_ended",
            headers={"retry-after": "1"},
        )

    async def _run_once(
        self, key: str, payload: bytes, message: bytes, limits: Limits, what: str
    ) -> Any:
        try:
            if len(self._loaded) >= _MAX_LOADED and key not in self._loaded:
                await self.stop()
            await self.start()
            seconds = limits.seconds * PATIENCE
            if key not in self._loaded:
                self._send(payload)
                self._loaded.add(key)
                seconds += _START_SECONDS
            self._send(message)
            try:
                outcome = await asyncio.wait_for(self._receive(), seconds)
            except asyncio.TimeoutError:
                raise LimitError(what, _time_reason(limits)) from None
            except (asyncio.IncompleteReadError, OSError):
                raise await self._cause_of_death(limits, what) from None
        except asyncio.CancelledError:
            await self.stop()  # its outcome is not for the next job
            raise
        except (LimitError, _WorkerDeathError):
            await self.stop()
            await self.start()  # now, so that the next job need not wait
            raise
        if outcome.is_last:
            await self.stop()
        if outcome.kind == "error":
            raise outcome.value
        if outcome.kind == "memory":
            raise LimitError(what, _memory_reason(limits))
        return outcome.value

    async def stop(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.returncode is None:
            try:
                process.kill()
            except ProcessLookupError:
                pass
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()

    def _send(self, body: bytes) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(LENGTH.pack(len(body)))
        self.process.stdin.write(body)

    async def _receive(self) -> Outcome:
        assert self.process is not None and self.process.stdout is not None
        head = await self.process.stdout.readexactly(LENGTH.size)
        body = await self.process.stdout.readexactly(LENGTH.unpack(head)[0])
        outcome: Outcome = pickle.loads(body)
        return outcome

    async def _cause_of_death(self, limits: Limits, what: str) -> LimitError | _WorkerDeathError:
        """The error for a process that has ended during a job."""
        assert self.process is not None
        code = await self.process.wait()
        if code in _TIME_SIGNALS:
            return LimitError(what, _time_reason(limits))
        if code == -signal.SIGABRT:  # what native code does when an allocation fails
            return LimitError(what, _memory_reason(limits))
        return _WorkerDeathError(code)


def _time_reason(limits: Limits) -> str:
    return (
        f"takes more than {limits.seconds:g} s of processor time to prepare (deadline); make it"
        " simpler, or start the server with a larger --prepare-seconds"
    )


def _memory_reason(limits: Limits) -> str:
    return (
        f"takes more than {limits.memory >> 20} MiB of memory to prepare (memory limit); make it"
        " simpler, or start the server with a larger --prepare-memory"
    )


class WorkerPool:
    """The worker processes, driven by an event loop on a thread of its own."""

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        self._events = EventLoopThread("anydecode-workers")
        self._turns = Turns(num_workers)
        self._idle = [_Worker() for _ in range(num_workers)]
        self._workers = list(self._idle)
        self._threads = ThreadPoolExecutor(num_workers, "anydecode-prepare")
        self._payloads: WeakKeyDictionary[Any, tuple[str, bytes]] = WeakKeyDictionary()
        self._num_objects = 0

    def start(self) -> None:
        """Start the processes now, so that no job waits for it."""
        for worker in self._workers:
            self._events.run(worker.start())

    async def run(
        self,
        client: Hashable,
        limits: Limits,
        what: str,
        using: Any,
        job: tuple[Callable[..., Any], tuple[Any, ...]] | None,
        finish: Callable[[Any], Any] = lambda result: result,
    ) -> Any:
        """Run a job in a process, then `finish` on a thread of this one; both in the client's turn.

        Args:
            client: The client, by which requests take turns.
            limits: The limits of the process.
            what: What is prepared, for messages.
            using: An object that is sent to a process once; the first argument of the job.
            job: A function that can be imported, and its further arguments; None for no job.
            finish: Applied to the job's result.

        Raises:
            LimitError: The job passes a limit.
            ApiError: The client's turn did not come (429), or the processes of the job ended (503).
            AnydecodeError: An error of the job.
        """

        async def in_turn() -> Any:
            await self._turns.acquire(client, limits.seconds * PATIENCE)
            worker = self._idle.pop()
            try:
                result = None
                if job is not None:
                    key, payload = self._payload(using)
                    message = _pickled((job[0], key, job[1], limits), what)
                    result = await worker.run(key, payload, message, limits, what)
                return await self._events.loop.run_in_executor(self._threads, finish, result)
            finally:
                self._idle.append(worker)
                self._turns.release(client)

        done = asyncio.run_coroutine_threadsafe(in_turn(), self._events.loop)
        return await asyncio.wrap_future(done)

    @property
    def process_ids(self) -> list[int]:
        """The ids of the processes that are running."""
        processes = [worker.process for worker in self._workers]
        return [one.pid for one in processes if one is not None and one.returncode is None]

    def close(self) -> None:
        """End the processes."""
        if not self._events.is_running:
            return
        for worker in self._workers:
            self._events.run(worker.stop())
        self._events.close()
        self._threads.shutdown(wait=False)

    def _payload(self, using: Any) -> tuple[str, bytes]:
        """The key of an object in the processes, and the message that loads it."""
        if using not in self._payloads:
            self._num_objects += 1
            key = str(self._num_objects)
            self._payloads[using] = key, pickle.dumps((None, key, using, None))
        return self._payloads[using]


def _pickled(message: object, what: str) -> bytes:
    try:
        return pickle.dumps(message)
    except RecursionError:
        raise ApiError(400, f"{what} is nested too deep: use fewer levels") from None


@cache
def worker_pool() -> WorkerPool:
    """The pool that all servers of this process share."""
    pool = WorkerPool()
    atexit.register(pool.close)
    return pool
