"""Runs `Engine.step`: in the threads of the callers, or on a background thread for async use."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from anydecode.engine.engine import Engine, Job
from anydecode.errors import EngineStoppedError
from anydecode.scoring.sequence import Sequence

#: What ends a call in the thread of its caller, and is no fault of the engine.
INTERRUPTS = (KeyboardInterrupt, SystemExit)

log = logging.getLogger("anydecode")


class Driver:
    """Makes one engine usable from several threads. A thread that waits for a job steps the engine;
    the jobs of all waiting threads share its passes.

    Jobs are submitted and cancelled through an inbox that is emptied between steps, so that with
    the background thread running no caller waits for a pass to end. What is put there interrupts a
    pass of several steps after its present step.

    An exception from `Engine.step` is a fault of the engine, whose state cannot be trusted
    afterwards. The engine stops: all running, waiting and new jobs end with `error`. The panic of a
    native library is such a fault too, although it is no `Exception`. Ctrl-C in a caller's thread
    ends only the running jobs.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.RLock()
        self._inbox: deque[Callable[[], object]] = deque()
        self._arriving: list[Job] = []  # those whose submission is in the inbox
        engine.arrivals = self._arrivals
        engine.between = self._between_steps
        self._wake_up = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._process = os.getpid()  # a fork has neither its threads nor their locks
        self._fault: BaseException | None = None  # what stopped the engine

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of the one that made the driver."""
        return os.getpid() != self._process

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return len(self.engine.running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait to run."""
        return len(self.engine.waiting)

    def status(self) -> dict[str, Any] | None:
        """The state of the workers that run the jobs, as JSON; None: this process runs them."""
        return None

    @property
    def error(self) -> EngineStoppedError | None:
        """A new exception for a job that ends because the engine has stopped; its cause is the
        fault. None while the engine runs."""
        fault = self._fault
        if fault is None:
            return None
        reason = " ".join(f"{type(fault).__name__}: {fault}".split()).removesuffix(":")
        error = EngineStoppedError(f"the engine stopped after an internal error: {reason}")
        error.__cause__ = fault
        return error

    def submit(self, job: Job) -> None:
        """Queue a job. If the engine has stopped, the job ends at once with `error`.

        Raises:
            EngineStoppedError: The driver is closed, or this process is a fork of the one that
                made it.
        """
        if self._closed:
            raise EngineStoppedError("the engine is closed: open another LLM")
        if self.is_fork:
            raise EngineStoppedError("the engine is another process's: open an LLM after the fork")
        self._arriving.append(job)
        self.post(lambda: self._start(job))

    def cancel(self, job: Job) -> None:
        """End a job and free its memory; with a background thread, after the running pass."""
        if not job.done:
            self.post(lambda: self.engine.cancel(job))

    def advance(self, until: Callable[[], bool]) -> None:
        """Step the engine until `until()` is true. Raises `error` if the engine stops before."""
        while not until():
            with self._lock:
                self._empty_inbox()
                if until():
                    return
                if (error := self.error) is not None:
                    raise error
                self._step()

    def run_in_background(self) -> None:
        """Start a thread that steps the engine whenever there is work."""
        if self._thread is not None:  # do not wait for the lock: a pass may hold it
            return
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._loop, name="anydecode", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Cancel all jobs and stop the thread. Does nothing in a fork, which has neither."""
        if self.is_fork:
            return
        self._closed = True
        with self._wake_up:
            self._wake_up.notify_all()
        with self._lock:
            self._empty_inbox()
            self.engine.close()
        if self._thread is not None:
            self._thread.join()

    def post(self, action: Callable[[], object]) -> None:
        """Run `action` between two passes, on the thread that steps the engine. An exception of it
        is a fault that stops the engine."""
        self._inbox.append(action)
        self.engine.interrupt()
        if self._thread is None or self._closed or self._fault is not None:
            with self._lock:
                self._empty_inbox()
        else:
            with self._wake_up:
                self._wake_up.notify_all()

    def _empty_inbox(self) -> None:
        self.engine.interrupt(False)  # before looking: what is posted later ends the next pass
        while self._inbox:
            action = self._inbox.popleft()
            try:
                action()
            except INTERRUPTS:
                raise
            except BaseException as fault:
                self._stop(fault)

    def _between_steps(self) -> None:
        """What a caller of `Engine.step` does between two steps, while a decoder is suspended."""
        self._empty_inbox()
        if self._closed:
            for job in [*self.engine.waiting, *self.engine.running]:
                self.engine.cancel(job)

    def _arrivals(self) -> list[Sequence]:
        return [job.sequence for job in tuple(self._arriving)]

    def _start(self, job: Job) -> None:
        self._arriving.remove(job)
        self.engine.submit(job)
        if self._closed:  # since `submit` has looked
            self.engine.cancel(job)
        if (error := self.error) is not None:
            self.engine.fail(error, waiting=True)

    def _step(self) -> None:
        try:
            self.engine.step()
        except INTERRUPTS as error:
            # Planned rows have not run, so no running job can continue.
            self.engine.fail(error)
            raise
        except BaseException as fault:
            self._stop(fault)

    def _stop(self, fault: BaseException) -> None:
        """End every job, including those submitted later."""
        self._fault = fault  # set before the jobs end, for jobs that are submitted meanwhile
        if (error := self.error) is not None:
            self.engine.fail(error, waiting=True)
        log.critical("the engine stopped", exc_info=fault)

    def _loop(self) -> None:
        while self._fault is None:
            with self._wake_up:
                while not (self._inbox or self.engine.has_work or self._closed):
                    self._wake_up.wait()
            with self._lock:
                if self._closed:
                    return
                try:
                    self._empty_inbox()
                    if self.engine.has_work and self._fault is None:
                        self.engine.step()
                except BaseException as fault:  # any exception ends this thread
                    self._stop(fault)
                    self._empty_inbox()
