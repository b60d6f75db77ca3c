"""Starts the workers of a fleet, and again when they end unasked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from anydecode.cluster.secret import VARIABLE
from anydecode.errors import FleetError, InvalidRequestError
from anydecode.server import logs

#: A worker that ended unasked so many times within `RESTART_SECONDS` is not started again.
MAX_RESTARTS = 5
RESTART_SECONDS = 300.0
#: How long a worker may take to end when it is asked to, in seconds.
STOP_SECONDS = 10.0
#: Exit code of a command line that the operator has to change.
_USAGE_ERROR = 2


@dataclass(frozen=True)
class Place:
    """A worker to start: its name and its role."""

    name: str
    role: str


def places(workers: int | None, prefill: int, decode: int, encode: int = 0) -> list[Place]:
    """The workers of a fleet: those with a role, and mixed ones up to the number of `workers`.

    Args:
        workers: The number of all workers; None: those with a role, or two without any.
        prefill: The number of workers that compute prompts.
        decode: The number of workers that generate.
        encode: The number of workers that encode images.

    Raises:
        InvalidRequestError: There are more roles than workers, or prompts would be computed that
            nobody continues.
    """
    stages = {"encode": encode, "prefill": prefill, "decode": decode}
    num_placed = sum(stages.values())
    if workers is None:
        workers = num_placed if prefill + decode else encode + 2
    if num_placed > workers:
        given = " and ".join(f"--{role} {number}" for role, number in stages.items() if number)
        raise InvalidRequestError(
            f"{given} are more roles than --workers {workers}: raise --workers, or leave it out"
        )
    if encode + prefill == workers:
        does = "compute prompts" if prefill else "encode images"
        raise InvalidRequestError(
            f"all {workers} workers {does}, and none generates: give --decode 1 or more"
        )
    roles = {**stages, "mixed": workers - num_placed}
    return [
        Place(f"{role}-{number + 1}", role)
        for role, number_of in roles.items()
        for number in range(number_of)
    ]


class WorkerProcess(Protocol):
    """A process that was started, as `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...

    def kill(self) -> None:
        """End it."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended. Raises `subprocess.TimeoutExpired`."""
        ...


class Starter(Protocol):
    """Starts the worker of a place."""

    def __call__(self, place: Place, /) -> WorkerProcess:
        """The started process. Raises `FleetError`: it could not be started."""
        ...


def start_process(
    arguments: Sequence[str], secret: str, *, has_output: bool = False
) -> subprocess.Popen[str]:
    """Start `anydecode cluster` as a process of this machine. Ctrl-C does not reach it: the process
    that has started it ends it.

    Args:
        arguments: The subcommand and its arguments.
        secret: The secret of the fleet.
        has_output: Whether what it writes can be read from `stdout` of the result.

    Raises:
        FleetError: It could not be started.
    """
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "anydecode", "cluster", *arguments],
            env={**os.environ, VARIABLE: secret},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if has_output else None,
            stderr=subprocess.STDOUT if has_output else None,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise FleetError(f"no process could be started: {error.strerror}") from None


class LocalWorkers:
    """Starts workers as processes of this machine.

    Args:
        arguments: The arguments of `anydecode cluster worker` that all workers have.
        secret: The secret of the fleet.
    """

    def __init__(self, arguments: Sequence[str], secret: bytes) -> None:
        self._arguments, self._secret = list(arguments), secret.decode()

    def __call__(self, place: Place) -> WorkerProcess:
        own = ["--name", place.name, "--role", place.role]
        return start_process(["worker", *self._arguments, *own], self._secret)


@dataclass(eq=False)
class _Child:
    place: Place
    process: WorkerProcess
    starts: list[float] = field(default_factory=list)


class Launcher:
    """The workers of a fleet.

    Args:
        start: Starts one of them, such as `LocalWorkers`.
    """

    def __init__(self, start: Starter) -> None:
        self._start = start
        self._children: list[_Child] = []
        self._is_closed = threading.Event()
        self._watch = threading.Thread(
            target=self._watch_all, name="anydecode-workers", daemon=True
        )

    def start(self, wanted: Sequence[Place]) -> None:
        """Start workers.

        Raises:
            FleetError: One could not be started.
        """
        for place in wanted:
            self._children.append(_Child(place, self._start(place), [time.monotonic()]))
        self._watch.start()

    @property
    def num_workers(self) -> int:
        """The number of workers that run or are started again."""
        return len(self._children)

    def close(self) -> None:
        """End all workers."""
        self._is_closed.set()
        if self._watch.is_alive():
            self._watch.join()
        for child in self._children:
            child.process.terminate()
        for child in self._children:
            try:
                child.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()

    def _watch_all(self) -> None:
        while not self._is_closed.wait(0.5):
            for child in list(self._children):
                code = child.process.poll()
                if code is not None:
                    self._on_end(child, code)

    def _on_end(self, child: _Child, code: int) -> None:
        now = time.monotonic()
        child.starts = [start for start in child.starts if now - start < RESTART_SECONDS]
        is_over = code in (0, _USAGE_ERROR) or len(child.starts) > MAX_RESTARTS
        logs.event("worker_ended", worker=child.place.name, code=code, is_restarted=not is_over)
        if is_over:
            self._children.remove(child)
            return
        try:
            child.process = self._start(child.place)
        except FleetError as error:
            logs.event("worker_not_restarted", worker=child.place.name, reason=str(error))
            self._children.remove(child)
            return
        child.starts.append(now)
