"""The metrics of a fleet: numbers of its status, with a bounded number of labels."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, generate_latest

from anydecode.cluster.fleet import WorkerFacts
from anydecode.cluster.metrics import MAX_LABELLED, OTHER, FleetCollector
from anydecode.cluster.proxy import FleetLLM
from anydecode.server.metrics import Metrics
from simulated_fleet import World


def registry_of(world: World) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(FleetCollector(lambda: world.fleet.status(world.now)))
    return registry


def test_the_numbers_are_those_of_the_workers() -> None:
    world = World()
    names = [world.join("prefill"), world.join("decode"), world.join("decode")]
    for _ in range(4):
        world.submit()
    world.crash(names[2])
    registry = registry_of(world)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"anydecode_{name}", labels)

    assert value("fleet_tasks_total") == 4
    assert value("fleet_lost_workers_total") == 1
    assert value("fleet_workers", role="decode", state="ready") == 1
    assert value("fleet_workers", role="prefill", state="ready") == 1
    held = {one.facts.name: len(one.tasks) for one in world.fleet.members.values()}
    assert sum(held.values()) > 0
    assert {name: value("worker_tasks", worker=name) for name in held} == held
    assert value("worker_tasks", worker=names[2]) is None  # it is not there
    world.settle(5)
    passes = world.workers[names[1]].num_passes
    assert passes - 1 <= (value("worker_passes_total", worker=names[1]) or 0) <= passes


def test_workers_beyond_the_bound_are_summed() -> None:
    world = World()
    for number in range(MAX_LABELLED + 3):
        name = f"w{number:03}"
        facts = WorkerFacts(name, name, "mixed", "g", ("h", 1), 1, 100)
        assert world.fleet.join(facts, world.now) is None
    text = generate_latest(registry_of(world)).decode()
    lines = [one for one in text.splitlines() if one.startswith("anydecode_worker_cache_positions")]
    assert len(lines) == MAX_LABELLED + 1
    assert f'anydecode_worker_cache_positions{{worker="{OTHER}"}} 300.0' in lines


def test_samples_of_the_fleet_run_and_wait() -> None:
    """Without a worker they wait."""
    with FleetLLM("tiny-autoregressive", b"a secret of the tests", threads=1) as fleet:
        registry = Metrics(lambda: {"tiny": fleet}).registry
        stream = fleet.request("a", max_tokens=4, n=2, temperature=1.0)
        for job in stream.jobs:
            fleet.driver.submit(job)
        stop = time.monotonic() + 30
        while registry.get_sample_value("anydecode_waiting_sequences") != 2:
            assert time.monotonic() < stop
            time.sleep(0.01)
        assert registry.get_sample_value("anydecode_running_sequences") == 0
