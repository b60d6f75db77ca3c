"""Who turns the engine's crank: the callers themselves, or a background thread for async use."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from anydecode.engine.engine import Engine, Job
from anydecode.errors import EngineStoppedError

log = logging.getLogger("anydecode")


class Driver:
    """Makes one engine usable from several threads. Whoever waits for a job steps the engine; all
    waiting threads' jobs share its passes.

    Jobs come and go through an inbox that is emptied between steps, so that with the background
    thread running nobody who submits or cancels waits for a pass to end.

    An exception out of `Engine.step` is a fault of the engine itself, and its state cannot be
    trusted afterwards. The engine stops: all jobs, running, waiting and new, end with `error`.
    Ctrl-C in a caller's thread ends only what runs.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.RLock()
        self._inbox: deque[Callable[[], object]] = deque()
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._fault: BaseException | None = None  # what stopped the engine

    @property
    def error(self) -> EngineStoppedError | None:
        """What every job ends with once the engine has stopped, made anew for each; its cause is
        the fault. None while the engine runs."""
        fault = self._fault
        if fault is None:
            return None
        reason = " ".join(f"{type(fault).__name__}: {fault}".split()).removesuffix(":")
        error = EngineStoppedError(f"the engine stopped after a fault of its own: {reason}")
        error.__cause__ = fault
        return error

    def submit(self, job: Job) -> None:
        """Queue a job. Where the engine has stopped, the job ends at once with `error`."""
        self._post(lambda: self._start(job))

    def cancel(self, job: Job) -> None:
        """End a job and free its memory; with a background thread, at the end of the pass that is
        under way."""
        if not job.done:
            self._post(lambda: self.engine.cancel(job))

    def advance(self, until: Callable[[], bool]) -> None:
        """Step the engine until `until()` holds. Raises `error` if the engine stops before."""
        while not until():
            with self._lock:
                self._take()
                if until():
                    return
                if (error := self.error) is not None:
                    raise error
                self._step()

    def run_in_background(self) -> None:
        """Start a thread that steps the engine whenever there is work."""
        if self._thread is not None:  # the lock may be held for as long as a pass takes
            return
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._loop, name="anydecode", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Cancel everything and stop the thread."""
        self._closed = True
        with self._news:
            self._news.notify_all()
        with self._lock:
            self._take()
            self.engine.close()
        if self._thread is not None:
            self._thread.join()

    def _post(self, action: Callable[[], object]) -> None:
        self._inbox.append(action)
        if self._thread is None or self._closed or self._fault is not None:
            with self._lock:
                self._take()
        else:
            with self._news:
                self._news.notify_all()

    def _take(self) -> None:
        while self._inbox:
            action = self._inbox.popleft()
            try:
                action()
            except Exception as fault:
                self._stop(fault)

    def _start(self, job: Job) -> None:
        self.engine.submit(job)
        if (error := self.error) is not None:
            self.engine.fail(error, waiting=True)

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as fault:
            self._stop(fault)
        except BaseException as error:
            # Rows that were planned have not run: nothing that runs can go on from there.
            self.engine.fail(error)
            raise

    def _stop(self, fault: BaseException) -> None:
        """End every job, now and from now on."""
        self._fault = fault  # before the jobs end: what comes later finds it
        if (error := self.error) is not None:
            self.engine.fail(error, waiting=True)
        log.critical("the engine stopped", exc_info=fault)

    def _loop(self) -> None:
        while self._fault is None:
            with self._news:
                while not (self._inbox or self.engine.has_work or self._closed):
                    self._news.wait()
            with self._lock:
                if self._closed:
                    return
                try:
                    self._take()
                    if self.engine.has_work and self._fault is None:
                        self.engine.step()
                except BaseException as fault:  # whatever it was, this thread steps no more
                    self._stop(fault)
                    self._take()
