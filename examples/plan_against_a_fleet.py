"""Compares the latencies that the simulator of `anydecode cluster plan` predicts with those of a
real fleet on this machine, on the second half of a trace.

python examples/plan_against_a_fleet.py TRACE [MODEL [RATE [REQUESTS [SHORTEN [PREFILL DECODE]]]]]

Without the last two there is one worker. The costs of passes are measured with one thread on a
machine that does nothing else, and never on the trace.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from anydecode import LLM
from anydecode.api.request import Request
from anydecode.cluster.launcher import Launcher, LocalWorkers, Place, places
from anydecode.cluster.plan import Machine, measured
from anydecode.cluster.proxy import FleetLLM
from anydecode.cluster.simulator.simulation import Arrival, Link, Served, WorkerPlan, simulate
from anydecode.cluster.simulator.trace_files import arrivals, read_trace

SECRET = os.urandom(32).hex().encode()
ENGINE = {"threads": 1, "cache_positions": 16384}


def main(
    trace: str,
    model: str = "smollm2-135m-instruct",
    rate: str = "1",
    requests: str = "60",
    shorten: str = "8",
    prefill: str = "0",
    decode: str = "0",
) -> None:
    wanted = places(int(prefill) + int(decode) or 1, int(prefill), int(decode))
    traced = read_trace(Path(trace))
    held_out = traced[len(traced) // 2 :][: int(requests)]
    arriving = arrivals(held_out, float(rate), float(shorten))
    with LLM(model, draft="none", **ENGINE) as llm:
        machine = measured(llm)
    predicted = _simulated(arriving, wanted, machine)
    real = _served(arriving, wanted, model)
    print(f"{len(real)} requests, {rate} per second, {', '.join(one.name for one in wanted)}")
    for name, values in (
        ("time to first token", lambda one: one.first_token_seconds),
        ("time per token", lambda one: one.seconds_per_token),
    ):
        for percentile in (50, 90):
            guess, truth = (
                1000 * float(np.percentile([values(one) for one in served], percentile))
                for served in (predicted, real)
            )
            # Tokens that arrive together have no time between them.
            error = f"{100 * (guess / truth - 1):+6.1f}%" if truth else ""
            print(
                f"{name:20} P{percentile}  predicted {guess:8.1f} ms  real {truth:8.1f} ms  {error}"
            )


def _simulated(arriving: list[Arrival], wanted: list[Place], machine: Machine) -> list[Served]:
    workers = [
        WorkerPlan(one.role, machine.costs, machine.positions, num_layers=machine.num_layers)
        for one in wanted
    ]
    return simulate(arriving, workers, Link(machine.position_bytes, latency=0.004)).served


def _served(arriving: list[Arrival], wanted: list[Place], model: str) -> list[Served]:
    """The times of the tokens of a real fleet."""
    with FleetLLM(model, SECRET, draft="none", **ENGINE) as fleet:
        arguments = [model, "--address", f"127.0.0.1:{fleet.fleet_port}", "--draft", "none"]
        for name, value in ENGINE.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        launcher = Launcher(LocalWorkers(arguments, SECRET))
        launcher.start(wanted)
        try:
            while len(fleet.status()["workers"]) < len(wanted):
                time.sleep(0.1)
            fleet.generate([1] * 100, max_tokens=4, ignore_eos=True)
            start = time.monotonic()
            sent = [_send(fleet, one, start) for one in arriving]
            while not all(request.done for _, request in sent):
                time.sleep(0.05)
            for _, request in sent:
                request.generation()  # raises its error, if any
        finally:
            launcher.close()
    return [served for served, _ in sent]


def _send(fleet: FleetLLM, arrival: Arrival, start: float) -> tuple[Served, Request]:
    """Submit a request at its time; its `Served` fills as the tokens come."""
    time.sleep(max(0.0, start + arrival.time - time.monotonic()))
    request = fleet.request(
        arrival.prompt, decoder="autoregressive", max_tokens=arrival.num_tokens, ignore_eos=True
    )
    [job] = request.jobs
    served = Served(arrival.time)

    def on_progress() -> None:  # on the thread of the fleet
        num_new = len(job.sequence.tokens) - len(served.token_times)
        served.token_times += [time.monotonic() - start] * num_new

    request.notify(on_progress)
    fleet.driver.submit(job)
    return served, request


if __name__ == "__main__":
    main(*sys.argv[1:])
