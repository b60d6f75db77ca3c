"""Compares what the simulator of `anydecode cluster plan` predicts with a real fleet of this
machine, on the second half of a trace.

python examples/plan_against_a_fleet.py TRACE --model MODEL --rate 1 --prefill 1 --decode 1
python examples/plan_against_a_fleet.py TRACE --model MODEL --slo ttft=2,tpot=0.1 --goodput

The costs of passes are measured first, with as many processes at once as the fleet has workers,
and never on the trace. The machine should be otherwise idle.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from anydecode import LLM
from anydecode.api.request import Request
from anydecode.cluster.control.distserve import Limits, Placement, PlacementSearch
from anydecode.cluster.launcher import Launcher, LocalWorkers, Place, places
from anydecode.cluster.plan import Machine, measured, worker_plan
from anydecode.cluster.proxy import FleetLLM
from anydecode.cluster.simulator.simulation import Arrival, Link, Served, simulate
from anydecode.cluster.simulator.trace_files import TracedRequest, arrivals, read_trace

SECRET = os.urandom(32).hex().encode()
ENGINE = {"threads": 1, "cache_positions": 16384}

Serve = Callable[[list[Arrival]], list[Served]]


def main() -> None:
    options = parsed()
    if options.neighbour:
        be_busy(options.model)
    num_workers = options.workers or options.prefill + options.decode or 1
    wanted = places(num_workers, options.prefill, options.decode)
    traced = read_trace(options.trace)
    held_out = traced[len(traced) // 2 :][: options.requests]
    machine = machine_of(options.model, len(wanted))
    plans = [worker_plan(one.role, machine) for one in wanted]
    link = Link(machine.position_bytes, latency=0.004)

    def simulated(arriving: list[Arrival]) -> list[Served]:
        return simulate(arriving, plans, link).served

    print(f"{', '.join(one.name for one in wanted)}: {len(held_out)} requests", flush=True)
    with FleetLLM(options.model, SECRET, draft="none", **ENGINE) as fleet:
        launcher = started(fleet, options.model, wanted)

        def real(arriving: list[Arrival]) -> list[Served]:
            return served_by(fleet, arriving)

        try:
            compare(held_out, options, simulated, real)
        finally:
            launcher.close()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--shorten", type=float, default=8.0, help="divides all lengths")
    parser.add_argument("--workers", type=int, help="those with a role, or 1")
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--decode", type=int, default=0)
    parser.add_argument("--slo", type=limits, default="ttft=2,tpot=0.1", help="ttft=S,tpot=S")
    parser.add_argument(
        "--goodput", action="store_true", help="find the highest rate within the limits, too"
    )
    parser.add_argument("--neighbour", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def limits(text: str) -> Limits:
    return Limits(**{name: float(value) for name, value in (p.split("=") for p in text.split(","))})


def compare(
    held_out: list[TracedRequest], options: argparse.Namespace, simulated: Serve, real: Serve
) -> None:
    """Print both side by side, and the ratio."""
    arriving = arrivals(held_out, options.rate, options.shorten)
    both = [figures(serve(arriving), options.slo) for serve in (simulated, real)]
    print(f"at {options.rate:g} requests/s\n{'':28}{'simulated':>12}{'real':>12}{'ratio':>9}")
    for name in both[0]:
        print_line(name, both[0][name], both[1][name])
    if not options.goodput:
        return
    search = PlacementSearch(max_probes=10)

    def goodput(serve: Serve) -> float:
        def latencies(placement: Placement, rate: float) -> list[tuple[float, float]]:
            served = serve(arrivals(held_out, rate, options.shorten))
            return [(one.first_token_seconds, one.seconds_per_token) for one in served]

        return search.goodput(Placement(), options.slo, latencies, options.rate).goodput

    print_line("goodput, requests/s", goodput(simulated), goodput(real))


def figures(served: list[Served], slo: Limits) -> dict[str, float]:
    found = {}
    for name, values in (
        ("time to first token", [one.first_token_seconds for one in served]),
        ("time per token", [one.seconds_per_token for one in served]),
    ):
        for percentile in (50, 90, 99):
            found[f"{name}, P{percentile}, ms"] = 1000 * float(np.percentile(values, percentile))
    seconds = max(one.token_times[-1] for one in served)
    is_within = slo.share([(one.first_token_seconds, one.seconds_per_token) for one in served])
    found["tokens per second"] = sum(len(one.token_times) for one in served) / seconds
    found["within the limits, percent"] = 100 * is_within
    found["within the limits, per s"] = is_within * len(served) / seconds
    return found


def print_line(name: str, simulated: float, real: float) -> None:
    # Tokens that arrive together have no time between them.
    ratio = f"{simulated / real:9.3f}" if real else ""
    print(f"{name:28}{simulated:12.2f}{real:12.2f}{ratio}", flush=True)


def machine_of(model: str, num_workers: int) -> Machine:
    """The machine, measured while the other workers' processes compute passes, too."""
    command = [sys.executable, __file__, "-", "--model", model, "--neighbour"]
    neighbours = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(1, num_workers)]
    try:
        for one in neighbours:
            assert one.stdout is not None
            one.stdout.readline()
        with LLM(model, draft="none", **ENGINE) as llm:
            return measured(llm)
    finally:
        for one in neighbours:
            one.kill()
            one.wait()


def be_busy(model: str) -> None:
    """Compute passes until this process is killed."""
    with LLM(model, draft="none", **ENGINE) as llm:
        print("ready", flush=True)
        while True:
            measured(llm)


def started(fleet: FleetLLM, model: str, wanted: list[Place]) -> Launcher:
    """Start the workers, and wait until they have joined and have computed something."""
    arguments = [model, "--address", f"127.0.0.1:{fleet.fleet_port}", "--draft", "none"]
    for name, value in ENGINE.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    launcher = Launcher(LocalWorkers(arguments, SECRET))
    launcher.start(wanted)
    while len(fleet.status()["workers"]) < len(wanted):
        time.sleep(0.1)
    warming = [arrivals([TracedRequest(0.0, 100, 4)] * 2, 1.0)[0]] * 2 * len(wanted)
    served_by(fleet, warming)
    return launcher


def served_by(fleet: FleetLLM, arriving: list[Arrival]) -> list[Served]:
    """The times of the tokens of a real fleet, which starts without cached prompts."""
    namespace = time.time_ns()
    start = time.monotonic()
    sent = [send(fleet, one, start, namespace) for one in arriving]
    while not all(request.done for _, request in sent):
        time.sleep(0.05)
    for _, request in sent:
        request.generation()  # raises its error, if any
    return [served for served, _ in sent]


def send(fleet: FleetLLM, arrival: Arrival, start: float, namespace: int) -> tuple[Served, Request]:
    """Submit a request at its time; its `Served` fills as the tokens come."""
    time.sleep(max(0.0, start + arrival.time - time.monotonic()))
    request = fleet.request(
        arrival.prompt,
        decoder="autoregressive",
        max_tokens=arrival.num_tokens,
        ignore_eos=True,
        namespace=namespace,
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
    main()
