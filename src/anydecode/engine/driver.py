"""Who turns the engine's crank: the callers themselves, or a background thread for async use."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from anydecode.engine.engine import Engine, Job

log = logging.getLogger("anydecode")


class Driver:
    """Makes one engine usable from several threads. Whoever waits for a job steps the engine; all
    waiting threads' jobs share its passes.

    Jobs come and go through an inbox that is emptied between steps, so that with the background
    thread running nobody who submits or cancels waits for a pass to end.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.RLock()
        self._inbox: deque[Callable[[], object]] = deque()
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._post(lambda: self.engine.submit(job))

    def cancel(self, job: Job) -> None:
        """End a job and free its memory; with a background thread, at the end of the pass that is
        under way."""
        if not job.done:
            self._post(lambda: self.engine.cancel(job))

    def advance(self, until: Callable[[], bool]) -> None:
        """Step the engine until `until()` holds."""
        while not until():
            with self._lock:
                self._take()
                if until():
                    return
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
        if self._thread is None or self._closed:
            with self._lock:
                self._take()
        else:
            with self._news:
                self._news.notify_all()

    def _take(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _step(self) -> None:
        """One step. Where it is broken off (by a fault of the engine itself, by Ctrl-C), rows that
        were planned have not run, and nothing that runs can go on from there."""
        try:
            self.engine.step()
        except BaseException as error:
            self.engine.fail(error)
            raise

    def _loop(self) -> None:
        while True:
            with self._news:
                while not (self._inbox or self.engine.has_work or self._closed):
                    self._news.wait()
            with self._lock:
                if self._closed:
                    return
                try:
                    self._take()
                    if self.engine.has_work:
                        self._step()
                except Exception:
                    log.exception("a step of the engine failed")
