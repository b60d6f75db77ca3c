"""Fleets of this machine, and requests that are sent to them at their times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from threading import Event
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.api.request import Request
from anydecode.cluster.control.distserve import Limits
from anydecode.cluster.launcher import Launcher, LocalWorkers, Place
from anydecode.cluster.proxy import FleetLLM
from anydecode.cluster.simulator.simulation import Arrival, Served
from anydecode.cluster.simulator.trace_files import TracedRequest, arrivals
from anydecode.errors import FleetError

#: Serves requests, each at its time.
Serve = Callable[[list[Arrival]], list[Served]]


@contextmanager
def local_fleet(model: str, wanted: Sequence[Place], **engine: Any) -> Iterator[FleetLLM]:
    """A fleet whose workers are processes of this machine. They have joined, and have computed a
    prompt each.

    Args:
        model: The model.
        wanted: The workers.
        **engine: Options of `LLM`, of which `anydecode cluster worker` has options of this name.

    Raises:
        FleetError: A worker has ended before all have joined.
    """
    secret = os.urandom(32).hex().encode()
    fleet = FleetLLM(model, secret, draft="none", **engine)
    with fleet:
        arguments = [model, "--address", f"127.0.0.1:{fleet.fleet_port}", "--draft", "none"]
        for name, value in engine.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        launcher = Launcher(LocalWorkers(arguments, secret))
        launcher.start(wanted)
        try:
            while len(fleet.status()["workers"]) < len(wanted):
                if launcher.num_workers < len(wanted):
                    raise FleetError("a worker of the fleet has ended; its message says why")
                time.sleep(0.1)
            warm_up(fleet, 2 * len(wanted))
            yield fleet
        finally:
            launcher.close()


def warm_up(llm: LLM, num_requests: int) -> None:
    """Serve a few requests of 100 tokens, all at once."""
    one = arrivals([TracedRequest(0.0, 100, 4)] * 2, 1.0)[0]
    served_by(llm, [one] * num_requests)


def served_by(llm: LLM, arriving: Sequence[Arrival]) -> list[Served]:
    """The times of the tokens of a real engine or fleet, which starts without cached prompts."""
    namespace = time.time_ns()
    llm.driver.run_in_background()
    start = time.monotonic()
    sent = [_send(llm, one, start, namespace) for one in arriving]
    for _, request, is_done in sent:
        is_done.wait()
        request.generation()  # raises its error, if any
    return [served for served, _, _ in sent]


def _send(
    llm: LLM, arrival: Arrival, start: float, namespace: int
) -> tuple[Served, Request, Event]:
    """Submit a request at its time; its `Served` fills as the tokens come. The event is set when it
    is done."""
    time.sleep(max(0.0, start + arrival.time - time.monotonic()))
    request = llm.request(
        arrival.prompt,
        decoder="autoregressive",
        max_tokens=arrival.num_tokens,
        ignore_eos=True,
        namespace=namespace,
    )
    [job] = request.jobs
    served, is_done = Served(arrival.time), Event()

    def on_progress() -> None:  # on the thread of the engine or fleet
        num_new = len(job.sequence.tokens) - len(served.token_times)
        served.token_times += [time.monotonic() - start] * num_new
        if request.done:
            is_done.set()

    request.notify(on_progress)
    llm.driver.submit(job)
    return served, request, is_done


def request_seconds(num_requests: int = 100) -> float:
    """What a request takes besides its passes in a fleet of this machine: the time from a client to
    the engine of a worker and back. The median of requests for one token, on a tiny model."""
    model: str = "tiny-autoregressive"
    engine: dict[str, Any] = {"threads": 1, "cache_positions": 4096}
    arriving = [
        Arrival(0.0, [97, number % 200, number // 200], 1) for number in range(num_requests)
    ]
    with local_fleet(model, [Place("mixed-1", "mixed")], **engine) as fleet:
        served = [served_by(fleet, [one])[0] for one in arriving]
    with LLM(model, draft="none", **engine) as llm:
        steps = [_step_seconds(llm, one) for one in arriving]
    return max(0.0, median(one.token_times[0] for one in served) - median(steps))


def _step_seconds(llm: LLM, arrival: Arrival) -> float:
    """The duration of the steps of the engine for a request."""
    [job] = llm.request(
        arrival.prompt, decoder="autoregressive", max_tokens=arrival.num_tokens, ignore_eos=True
    ).jobs
    llm.engine.submit(job)
    start = time.perf_counter()
    while not job.done:
        llm.engine.step()
    return time.perf_counter() - start


def latency_figures(served: Sequence[Served], limits: Limits) -> dict[str, float]:
    """Percentiles of the latencies in milliseconds, tokens per second, and how many requests are
    within the limits."""
    found = {}
    for name, values in (
        ("time to first token", [one.first_token_seconds for one in served]),
        ("time per token", [one.seconds_per_token for one in served]),
    ):
        for percentile in (50, 90, 99):
            found[f"{name}, P{percentile}, ms"] = 1000 * float(np.percentile(values, percentile))
    seconds = max(one.token_times[-1] for one in served)
    share = limits.share([(one.first_token_seconds, one.seconds_per_token) for one in served])
    found["tokens per second"] = sum(len(one.token_times) for one in served) / seconds
    found["within the limits, percent"] = 100 * share
    found["within the limits, per s"] = share * len(served) / seconds
    return found
