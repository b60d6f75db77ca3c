"""Work on a thread of its own: results, errors, and the thread in a forked process."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest

from anydecode.constraints.background import BackgroundThread


def test_results_and_errors_come_from_one_other_thread() -> None:
    thread = BackgroundThread("tasks")
    ended = threading.Event()
    tasks = [thread.submit(threading.get_ident) for _ in range(2)]
    failed = thread.submit(lambda: 1 // 0)
    thread.submit(ended.set)
    assert ended.wait(60)
    assert tasks[0].result() == tasks[1].result() != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_a_task_that_has_not_begun_does_not_wait_for_those_before_it() -> None:
    thread = BackgroundThread("tasks")
    begun, released = threading.Event(), threading.Event()
    results: list[int] = []

    def wait() -> bool:
        begun.set()
        return released.wait(60)

    before = thread.submit(wait)
    assert begun.wait(60)
    task = thread.submit(lambda: results.append(threading.get_ident()))
    task.result()
    assert results == [threading.get_ident()]
    released.set()
    assert before.result()
    thread.submit(lambda: None).result()
    task.result()
    assert len(results) == 1


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
