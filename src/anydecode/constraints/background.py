"""Work on a thread of its own, beside the engine's forward pass."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class BackgroundTask(Generic[Result]):
    """A result that is computed on another thread. Not a `Future`: its locks often take longer than
    the computation of a mask."""

    def __init__(self, compute: Callable[[], Result]) -> None:
        self._compute = compute
        self._done = threading.Lock()
        self._done.acquire()
        self._claim = threading.Lock()  # of the thread that computes it
        self._result: Result
        self._error: BaseException | None = None

    def run(self) -> None:
        """Computes the result, unless another thread has begun to. Called on the other thread, or
        on that which needs the result, if tasks before this one may take long."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._result = self._compute()
        except BaseException as error:
            self._error = error
        self._done.release()

    def wait(self, seconds: float) -> bool:
        """Waits at most so long for the result, and returns whether there is one."""
        is_done = self._done.acquire(timeout=seconds)
        if is_done:
            self._done.release()
        return is_done

    def result(self) -> Result:
        """Waits for the result and returns it, or raises the error of its computation."""
        with self._done:
            pass
        if self._error is not None:
            raise self._error
        return self._result


#: Does other work until a function of a number of seconds, which waits at most so long, is true.
OtherWork = Callable[[Callable[[float], bool]], None]
_local = threading.local()


def set_other_work(work: OtherWork | None) -> OtherWork | None:
    """Sets what this thread does while it waits (None: nothing), and returns what it did before."""
    before: OtherWork | None = getattr(_local, "work", None)
    _local.work = work
    return before


def has_other_work() -> bool:
    """Whether this thread has other work to do while it waits."""
    return getattr(_local, "work", None) is not None


def work_until(is_over: Callable[[float], bool]) -> None:
    """Does this thread's other work until `is_over(seconds)`, which waits at most so long."""
    work: OtherWork | None = getattr(_local, "work", None)
    if work is not None:
        work(is_over)
    else:
        while not is_over(threading.TIMEOUT_MAX):
            pass


class BackgroundThread:
    """A thread that runs tasks in order. It starts on first use, in a forked process again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: int | None = None  # whose thread runs the tasks: a fork does not have it
        self._tasks: SimpleQueue[BackgroundTask[Any]]

    def submit(self, compute: Callable[[], Result]) -> BackgroundTask[Result]:
        """Starts a task."""
        if self._process != os.getpid():
            self._process, self._tasks = os.getpid(), SimpleQueue()
            threading.Thread(
                target=_run_tasks, args=(self._tasks,), name=self._name, daemon=True
            ).start()
        task = BackgroundTask(compute)
        self._tasks.put(task)
        return task


def _run_tasks(tasks: SimpleQueue[BackgroundTask[Any]]) -> None:
    while True:
        tasks.get().run()
