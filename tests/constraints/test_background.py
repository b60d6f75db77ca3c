"""Work on a thread of its own: results, errors, and the thread in a forked process."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable

import pytest

from anydecode.constraints.background import (
    BackgroundThread,
    has_other_work,
    set_other_work,
    work_until,
)


def test_results_and_errors_come_from_one_other_thread() -> None:
    thread = BackgroundThread("tasks")
    tasks = [thread.submit(threading.get_ident) for _ in range(2)]
    failed = thread.submit(lambda: 1 // 0)
    assert tasks[0].result() == tasks[1].result() != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_a_task_that_has_not_begun_runs_where_it_is_needed() -> None:
    thread, may_end = BackgroundThread("tasks"), threading.Event()
    first, second = thread.submit(may_end.wait), thread.submit(threading.get_ident)
    assert not second.wait(0)
    second.run()
    assert second.wait(0) and second.result() == threading.get_ident()
    assert not first.wait(0)
    may_end.set()
    assert first.result() and first.wait(0)
    second.run()  # once only
    assert second.result() == threading.get_ident()


def test_a_thread_does_its_other_work_while_it_waits() -> None:
    waits: list[float] = []

    def is_over(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 2

    def work(is_over: Callable[[float], bool]) -> None:
        while not is_over(0.5):
            pass

    assert not has_other_work() and set_other_work(work) is None
    try:
        work_until(is_over)
        assert waits == [0.5] * 3 and has_other_work()
        other = BackgroundThread("tasks").submit(has_other_work)
        assert not other.result()  # of this thread only
    finally:
        assert set_other_work(None) is work
    del waits[:]
    work_until(is_over)
    assert waits == [threading.TIMEOUT_MAX] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_starts_its_own_thread() -> None:
    thread = BackgroundThread("tasks")
    assert thread.submit(os.getpid).result() == os.getpid()
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=lambda: writer.send(thread.submit(os.getpid).result()))
    child.start()
    try:
        assert reader.poll(60), "the child waits"
        assert reader.recv() == child.pid
    finally:
        child.kill()
        child.join()
    assert thread.submit(os.getpid).result() == os.getpid()
