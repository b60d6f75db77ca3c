"""Workers that Ray starts; skipped without Ray."""

from __future__ import annotations

import os
import signal
import time

import pytest

from anydecode import LLM
from anydecode.cluster import ray_workers
from anydecode.cluster.launcher import Launcher, Place
from anydecode.cluster.proxy import FleetLLM
from anydecode.cluster.ray_workers import RayWorkers
from anydecode.cluster.worker import WorkerOptions
from anydecode.server import logs

SECRET = b"a secret of the tests"
MODEL, ENGINE = "tiny-autoregressive", {"threads": 1, "cache_positions": 4096}


def _pids(fleet: FleetLLM, count: int) -> dict[str, int]:
    """The processes of the workers, when there are so many."""
    for _ in range(600):
        workers = fleet.status()["workers"]
        if len(workers) == count:
            break
        time.sleep(0.1)
    return {one["name"]: one["pid"] for one in workers}


@pytest.mark.slow
def test_ray_starts_workers_again_and_no_word_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # which would write a file into the home folder
    options = {"max_tokens": 40, "temperature": 1.0, "seed": 3}
    with LLM(MODEL, **ENGINE) as llm:
        expected = llm.generate("a", **options).text
    with FleetLLM(MODEL, SECRET, **ENGINE) as fleet:
        common = WorkerOptions(MODEL, "127.0.0.1", fleet.fleet_port, ENGINE, patience=2.0)
        workers = RayWorkers("local", common, SECRET, cores=1)
        launcher = Launcher(workers)
        launcher.start([Place("mixed-1", "mixed"), Place("mixed-2", "mixed")])
        try:
            first = _pids(fleet, 2)
            own, *priorities = (
                os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, *first.values())
            )
            assert priorities == [own, own]
            assert fleet.generate("a", **options).text == expected
            os.kill(first["mixed-1"], signal.SIGKILL)
            assert fleet.generate("a", **options).text == expected
            while fleet.status()["counts"]["lost_workers"] == 0:
                time.sleep(0.1)
            second = _pids(fleet, 2)
            assert second["mixed-2"] == first["mixed-2"]
            assert second["mixed-1"] != first["mixed-1"]
        finally:
            launcher.close()
            workers.close()


@pytest.mark.slow
def test_a_worker_without_a_machine_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray_workers, "WAITING_SECONDS", 1.0)
    events: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(logs, "event", lambda name, **fields: events.append((name, fields)))
    workers = RayWorkers("local", WorkerOptions(MODEL, "127.0.0.1", 1, ENGINE), SECRET, cores=9999)
    try:
        process = workers(Place("mixed-1", "mixed"))
        while not events:
            assert process.poll() is None
            time.sleep(0.1)
        for _ in range(20):
            assert process.poll() is None
        process.terminate()
    finally:
        workers.close()
    [(name, fields)] = events
    assert (name, fields["worker"]) == ("worker_waits", "mixed-1")
    assert "in 1 s: no machine of its cluster has 9999 free cores" in fields["reason"]
