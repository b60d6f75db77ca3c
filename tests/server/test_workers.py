"""Worker processes: limits, errors, turns, and the objects that they keep."""

from __future__ import annotations

import asyncio
import operator
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import worker_jobs
from worker_jobs import Table

pytest.importorskip("fastapi")

from anydecode.errors import ConstraintError
from anydecode.server.errors import ApiError
from anydecode.server.jobs import Limits
from anydecode.server.worker import LENGTH
from anydecode.server.workers import LimitError, Turns, WorkerPool

LIMITS = Limits(5.0, 1 << 30)
TABLE = Table(40)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


async def run(pool: WorkerPool, function: Any, *arguments: Any, **options: Any) -> Any:
    client, limits = options.get("client", "one"), options.get("limits", LIMITS)
    return await pool.run(client, limits, "the thing", TABLE, (function, arguments))


async def test_a_job_runs_in_another_process_with_a_low_priority(pool: WorkerPool) -> None:
    total, process = await run(pool, worker_jobs.add, 2)
    assert total == 42 and process != os.getpid()
    if hasattr(os, "nice"):
        assert await run(pool, worker_jobs.niceness) > os.nice(0)


async def test_jobs_past_a_limit_are_ended_and_the_limit_is_named(pool: WorkerPool) -> None:
    with pytest.raises(LimitError, match="more than 0.2 s of processor time.*deadline") as slow:
        await run(pool, worker_jobs.compute_forever, limits=Limits(0.2, 1 << 30))
    assert slow.value.status == 400 and "\n" not in slow.value.message
    if sys.platform == "linux":
        with pytest.raises(LimitError, match="more than 64 MiB.*memory limit"):
            await run(pool, worker_jobs.grow, 1 << 30, limits=Limits(5.0, 64 << 20))
    results = await asyncio.gather(*(run(pool, worker_jobs.add, i) for i in range(4)))
    assert [total for total, _ in results] == [40, 41, 42, 43]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
async def test_a_job_whose_process_is_killed_runs_again(
    pool: WorkerPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    job = asyncio.ensure_future(run(pool, worker_jobs.announce, str(started), str(go)))
    while not started.exists():
        await asyncio.sleep(0.01)
    first = int(started.read_text())
    os.kill(first, signal.SIGKILL)
    go.touch()
    assert await job not in (first, os.getpid())
    assert "code -9 during a job; it runs again" in caplog.text


async def test_the_server_is_at_fault_for_processes_that_end_twice(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ApiError, match="the thing could not be prepared") as failed:
        await run(pool, worker_jobs.crash)
    assert failed.value.status == 503 and not isinstance(failed.value, LimitError)
    assert failed.value.to_dict()["error"]["type"] == "server_error"
    assert "code 7 during a job; its request fails" in caplog.text
    assert (await run(pool, worker_jobs.add, 2))[0] == 42


async def test_arguments_that_are_nested_too_deep_are_refused(pool: WorkerPool) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ApiError, match="nested too deep"):
        await run(pool, worker_jobs.add, deep)


async def test_errors_of_a_job_are_raised_and_its_process_stays(pool: WorkerPool) -> None:
    pids = {pid for _, pid in [await run(pool, worker_jobs.add, 1) for _ in range(3)]}
    with pytest.raises(ConstraintError, match="no such thing"):
        await run(pool, worker_jobs.fail)
    assert (await run(pool, worker_jobs.add, 1))[1] in pids


async def test_one_client_does_not_keep_another_waiting(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "go")
    greedy = [
        asyncio.ensure_future(run(pool, worker_jobs.wait_for, path, client="greedy"))
        for _ in range(8)
    ]
    await asyncio.sleep(0)
    assert (await run(pool, worker_jobs.add, 2, client="other"))[0] == 42
    assert not any(job.done() for job in greedy)
    Path(path).touch()
    assert await asyncio.gather(*greedy) == [path] * 8


async def test_requests_of_one_client_go_on_beside_a_long_one(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "go")
    long = asyncio.ensure_future(run(pool, worker_jobs.wait_for, path))
    await asyncio.sleep(0)
    assert (await run(pool, worker_jobs.add, 2))[0] == 42
    assert not long.done()
    Path(path).touch()
    assert await long == path


async def test_a_cancelled_job_does_not_answer_the_next(pool: WorkerPool, tmp_path: Path) -> None:
    job = asyncio.ensure_future(run(pool, worker_jobs.wait_for, str(tmp_path / "never")))
    await asyncio.sleep(0.2)
    job.cancel()
    await asyncio.wait([job])
    for number in range(3):
        assert (await run(pool, worker_jobs.add, number))[0] == 40 + number


async def test_clients_take_turns_and_wait_a_bounded_time() -> None:
    turns, order = Turns(2), []

    async def visit(client: str) -> None:
        await turns.acquire(client, 60)
        order.append(client)
        await asyncio.sleep(0)
        turns.release(client)

    await asyncio.gather(*(visit(client) for client in ("a", "a", "a", "a", "b", "c")))
    assert order[:3] == ["a", "b", "c"] or order[:3] == ["a", "b", "a"]
    assert sorted(order) == ["a"] * 4 + ["b", "c"]
    await turns.acquire("a", 60)
    with pytest.raises(ApiError) as refused:
        await turns.acquire("a", 0.01)
    assert refused.value.status == 429 and refused.value.headers["retry-after"]
    await turns.acquire("b", 60)  # the other slot
    with pytest.raises(ApiError):
        await turns.acquire("c", 0.01)
    turns.release("a")
    await turns.acquire("c", 60)


def test_a_process_whose_server_was_killed_ends_without_a_traceback() -> None:
    """Rejects one that reports the pipe that nobody reads any more, in the log of the server."""
    messages = [(None, "key", [1], None), (operator.getitem, "key", (0,), Limits(10.0, 1 << 30))]
    bodies = [pickle.dumps(message) for message in messages]
    process = subprocess.Popen(
        [sys.executable, "-m", "anydecode.server.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.write(b"".join(LENGTH.pack(len(body)) + body for body in bodies))
    process.stdin.flush()  # stays open: the answer that nobody reads ends the process
    assert (process.wait(60), process.stderr.read()) == (0, b"")
    process.stdin.close()
    process.stderr.close()
