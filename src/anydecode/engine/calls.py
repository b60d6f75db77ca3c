"""Functions of decoders that run beside the engine, each on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar

from anydecode.scoring.score import Call

Owner = TypeVar("Owner")

#: Seconds for which the engine waits for a call when it has nothing else to do: how long a request
#: that arrives meanwhile, or a cancellation, may have to wait.
MAX_WAIT = 0.02


@dataclass(eq=False)
class _Running:
    """A call and its deadline. `outcome` is (result, error) once the function has ended."""

    call: Call
    deadline: float
    outcome: tuple[Any, BaseException | None] | None = None


class RunningCalls(Generic[Owner]):
    """The calls that run, at most one per owner. All methods are called on the engine's thread."""

    def __init__(self) -> None:
        self._running: dict[Owner, _Running] = {}
        self._has_ended = threading.Event()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, owner: Owner, call: Call) -> None:
        """Start a call. Its thread does not keep the process from ending."""
        running = _Running(call, monotonic() + call.seconds)
        self._running[owner] = running
        threading.Thread(
            target=self._run, args=(running,), name="anydecode-call", daemon=True
        ).start()

    def drop(self, owner: Owner) -> None:
        """Forget the call of `owner`, if there is one."""
        self._running.pop(owner, None)

    def finished(self, *, wait: bool) -> Iterator[tuple[Owner, Call]]:
        """The calls that have ended or passed their deadline, which are forgotten. Those that are
        dropped between two of them are left out.

        Args:
            wait: Whether to wait for one, at most `MAX_WAIT` seconds.
        """
        if wait:
            nearest = min(one.deadline for one in self._running.values()) - monotonic()
            self._has_ended.wait(max(0.0, min(MAX_WAIT, nearest)))
        self._has_ended.clear()
        now = monotonic()
        for owner, running in list(self._running.items()):
            call, outcome = running.call, running.outcome
            if self._running.get(owner) is not running:
                continue
            if outcome is None and now < running.deadline:
                continue
            call.is_late = outcome is None
            call.result, call.error = outcome or (None, None)
            del self._running[owner]
            yield owner, call

    def _run(self, running: _Running) -> None:
        try:
            running.outcome = running.call.function(), None
        except BaseException as error:  # the decoder decides what it means
            running.outcome = None, error
        self._has_ended.set()
