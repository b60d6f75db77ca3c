"""Compares what the simulator of `anydecode cluster plan` predicts with a real fleet of this
machine, on the second half of a trace.

python examples/plan_against_a_fleet.py TRACE --model MODEL --rate 1 --prefill 1 --decode 1
python examples/plan_against_a_fleet.py TRACE --model MODEL --slo ttft=2,tpot=0.1 --goodput
python examples/plan_against_a_fleet.py TRACE --model MODEL --schedule nexus --threads 2

The costs of passes are measured first, with as many processes at once as the fleet has workers,
and never on the trace. The machine should be otherwise idle.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from anydecode import LLM
from anydecode.benchmarks.fleet_runs import (
    Serve,
    latency_figures,
    local_fleet,
    request_seconds,
    served_by,
)
from anydecode.cluster.control.distserve import Limits, Placement, PlacementSearch
from anydecode.cluster.launcher import places
from anydecode.cluster.plan import Machine, measured, worker_plan
from anydecode.cluster.simulator.simulation import Arrival, Link, Served, simulate
from anydecode.cluster.simulator.trace_files import TracedRequest, arrivals, read_trace

CACHE_POSITIONS = 16384


def main() -> None:
    options = parsed()
    if options.neighbour:
        be_busy(options)
    num_workers = options.workers or options.prefill + options.decode or 1
    wanted = places(num_workers, options.prefill, options.decode)
    traced = read_trace(options.trace)
    held_out = traced[len(traced) // 2 :][: options.requests]
    machine = machine_of(options, len(wanted))
    plans = [worker_plan(one.role, machine) for one in wanted]
    link = Link(machine.position_bytes, latency=0.004, request_seconds=request_seconds())

    def simulated(arriving: list[Arrival]) -> list[Served]:
        return simulate(arriving, plans, link).served

    print(f"{', '.join(one.name for one in wanted)}: {len(held_out)} requests", flush=True)
    with local_fleet(options.model, wanted, **engine_of(options)) as fleet:
        compare(held_out, options, simulated, partial(served_by, fleet))


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
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--schedule", help="of the workers, such as nexus, which needs two threads")
    parser.add_argument("--slo", type=limits, default="ttft=2,tpot=0.1", help="ttft=S,tpot=S")
    parser.add_argument(
        "--goodput",
        action="store_true",
        help="serve at 0.9 and 1.1 times the simulated goodput, too",
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
    start = time.perf_counter()
    predicted = simulated(arriving)
    seconds = time.perf_counter() - start
    duration = max(one.token_times[-1] for one in predicted)
    print(f"{duration:.0f} s were simulated in {seconds:.2f} s", flush=True)
    both = [latency_figures(served, options.slo) for served in (predicted, real(arriving))]
    print(f"at {options.rate:g} requests/s\n{'':28}{'simulated':>12}{'real':>12}{'ratio':>9}")
    for name in both[0]:
        print_line(name, both[0][name], both[1][name])
    if not options.goodput:
        return
    goodput = simulated_goodput(held_out, options, simulated)
    print(f"simulated goodput: {goodput:.3g} requests/s; within the limits of the real fleet at")
    for factor in (0.9, 1.1):
        served = real(arrivals(held_out, factor * goodput, options.shorten))
        share = latency_figures(served, options.slo)["within the limits, percent"]
        print(f"{factor:g} times this rate: {share:.1f} percent", flush=True)


def simulated_goodput(
    held_out: list[TracedRequest], options: argparse.Namespace, simulated: Serve
) -> float:
    """The highest rate at which 90% of the requests are within the limits."""

    def latencies(placement: Placement, rate: float) -> list[tuple[float, float]]:
        served = simulated(arrivals(held_out, rate, options.shorten))
        return [(one.first_token_seconds, one.seconds_per_token) for one in served]

    search = PlacementSearch(precision=0.02)
    return search.goodput(Placement(), options.slo, latencies, options.rate).goodput


def print_line(name: str, simulated: float, real: float) -> None:
    # Tokens that arrive together have no time between them.
    ratio = f"{simulated / real:9.3f}" if real else ""
    print(f"{name:28}{simulated:12.2f}{real:12.2f}{ratio}", flush=True)


def engine_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `LLM` that the workers have."""
    engine: dict[str, Any] = {"threads": options.threads, "cache_positions": CACHE_POSITIONS}
    return engine | schedule_of(options)


def schedule_of(options: argparse.Namespace) -> dict[str, str]:
    return {} if options.schedule is None else {"schedule": options.schedule}


def machine_of(options: argparse.Namespace, num_workers: int) -> Machine:
    """The machine, measured while the other workers' processes compute passes, too."""
    command = [sys.executable, __file__, "-", "--model", options.model, "--neighbour"]
    command += ["--threads", str(options.threads)]
    neighbours = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(1, num_workers)]
    try:
        for one in neighbours:
            assert one.stdout is not None
            one.stdout.readline()
        with LLM(options.model, draft="none", **engine_of(options)) as llm:
            return measured(llm, engine=schedule_of(options))
    finally:
        for one in neighbours:
            one.kill()
            one.wait()


def be_busy(options: argparse.Namespace) -> None:
    """Compute passes until this process is killed."""
    with LLM(options.model, draft="none", **engine_of(options)) as llm:
        print("ready", flush=True)
        while True:
            measured(llm)


if __name__ == "__main__":
    main()
