"""Work on a thread of its own: results, errors, and the thread in a forked process."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest

from anydecode.constraints.background import BackgroundThread


def test_results_and_errors_come_from_one_other_thread() -> None:
    thread = BackgroundThread("tasks")
    tasks = [thread.submit(threading.get_ident) for _ in range(2)]
    failed = thread.submit(lambda: 1 // 0)
    assert tasks[0].result() == tasks[1].result() != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        failed.result()


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
