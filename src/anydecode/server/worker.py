"""The process that tries expensive work of requests under limits.

It reads jobs from its standard input and writes their results to its standard output, each as a
length and a pickle. It is started and stopped by `server.workers`, has a low priority, and loads no
model. A job that passes its limit of processor time ends the process through the system's timer; an
allocation beyond the memory limit fails.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from anydecode.errors import AnydecodeError
from anydecode.server.jobs import Limits, forget

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

#: The format of a message's length.
LENGTH = struct.Struct("<Q")
#: How much lower than the server's priority that of the process is (see nice(2)).
_NICENESS = 5
#: The process ends after a job if it has grown by more than this, in bytes.
_MAX_GROWTH = 256 << 20


class Outcome:
    """What became of a job: its `kind`, which is "result", "error" or "memory"; the result or the
    error; and whether the process ends after it."""

    def __init__(self, kind: str, value: Any, is_last: bool) -> None:
        self.kind = kind
        self.value = value
        self.is_last = is_last


def main() -> None:
    """Runs jobs until the input ends."""
    jobs, outcomes = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not reach the outcomes
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    tokenizers: dict[str, Any] = {}
    size = _data_bytes()
    while (job := _read(jobs)) is not None:
        function, key, arguments, limits = job
        if function is None:
            tokenizers[key] = arguments
            size = _data_bytes()
            continue
        outcome = _run(function, (tokenizers[key], *arguments), limits)
        forget()
        outcome.is_last = _data_bytes() > size + _MAX_GROWTH
        try:
            _write(outcomes, outcome)
        except BrokenPipeError:  # the server was killed
            os._exit(0)  # without another try to write what is left in the buffer
        if outcome.is_last:
            return


def _run(function: Any, arguments: tuple[Any, ...], limits: Limits) -> Outcome:
    try:
        with _limited(limits):
            return Outcome("result", function(*arguments), False)
    except MemoryError:
        return Outcome("memory", None, True)
    except AnydecodeError as error:
        return Outcome("error", error, False)


@contextmanager
def _limited(limits: Limits) -> Iterator[None]:
    """Applies `limits` where the system has them."""
    size = _data_bytes()
    if resource is not None and size:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size + limits.memory, hard))
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    try:
        yield
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        if resource is not None and size:
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _data_bytes() -> int:
    """The private memory of this process, in bytes, which the memory limit counts; 0 where it is
    not known."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[5]) * os.sysconf("SC_PAGE_SIZE")


def _read(stream: BinaryIO) -> Any:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return pickle.loads(stream.read(LENGTH.unpack(head)[0]))


def _write(stream: BinaryIO, message: object) -> None:
    body = pickle.dumps(message)
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


if __name__ == "__main__":
    # Under its own name, so that pickles name its classes as the server does.
    from anydecode.server import worker

    worker.main()
