"""Who turns the engine's crank: the callers themselves, or a background thread for async use."""

from __future__ import annotations

import threading
from collections.abc import Callable

from anydecode.engine.engine import Engine, Job


class Driver:
    """Makes one engine usable from several threads. Whoever waits for a job steps the engine; all
    waiting threads' jobs share its passes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Job) -> None:
        """Queue a job."""
        with self._work:
            self.engine.submit(job)
            self._work.notify_all()

    def cancel(self, job: Job) -> None:
        """End a job and free its memory."""
        with self._lock:
            self.engine.cancel(job)

    def advance(self, until: Callable[[], bool]) -> None:
        """Step the engine until `until()` holds."""
        while True:
            with self._lock:
                if until():
                    return
                self.engine.step()

    def run_in_background(self) -> None:
        """Start a thread that steps the engine whenever there is work."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._loop, name="anydecode", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Cancel everything and stop the thread."""
        with self._work:
            self._closed = True
            self.engine.close()
            self._work.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._work:
                while not self.engine.has_work and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                self.engine.step()
