"""`anydecode bench fleet`: what a hand-over and the proxy cost, and the same requests on one
process, on workers without roles, and on a prefill and a decode worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from anydecode.api.llm import LLM
from anydecode.benchmarks.fleet_runs import latency_figures, local_fleet, served_by, warm_up
from anydecode.benchmarks.serving.bench import parse_objective
from anydecode.cluster.control.distserve import Limits
from anydecode.cluster.launcher import Place
from anydecode.cluster.plan import position_bytes
from anydecode.cluster.proxy import FleetLLM
from anydecode.cluster.simulator.trace_files import TracedRequest, arrivals, read_trace
from anydecode.errors import InvalidRequestError
from anydecode.machine import cpu_name, usable_cores
from anydecode.report import JsonFile, write_report

#: Lengths of the prompts that are handed over.
HANDED_OVER = (64, 1000)
#: Tokens of an answer whose events are timed, and such answers per measurement.
EVENT_TOKENS, EVENT_ANSWERS = 256, 8
_POSITIONS = 16384
_PREFILL_AND_DECODE = (Place("prefill-1", "prefill"), Place("decode-1", "decode"))
_GREEDY: dict[str, Any] = {"decoder": "autoregressive", "ignore_eos": True}


@dataclass(frozen=True)
class Handover:
    """The time from the start of a request on the worker that generates to its first token, in
    seconds. The prompt has one token more than `tokens`.

    Attributes:
        tokens: The tokens that another worker has computed.
        computed: If the worker has none of them and computes them.
        handed_over: If they come from a prefill worker.
        cached: If the worker has them in its own cache.
    """

    tokens: int
    computed: float
    handed_over: float
    cached: float

    @property
    def ratio(self) -> float:
        """The cost of the hand-over divided by that of computing the tokens."""
        return (self.handed_over - self.cached) / (self.computed - self.cached)


@dataclass(frozen=True)
class Overhead:
    """What the proxy costs.

    Attributes:
        request: How much longer a request for one token takes than in one process, in seconds.
        request_cpu: The processor time of the proxy for such a request, in seconds.
        event_cpu: Its processor time for each further event with tokens of an answer, in seconds.
    """

    request: float
    request_cpu: float
    event_cpu: float


def measure_handover(model: str, repeats: int) -> list[Handover]:
    """Measure hand-overs between two processes. Medians of `repeats` prompts of each length."""
    seconds: dict[int, list[tuple[float, float, float]]] = {one: [] for one in HANDED_OVER}
    engine = {"threads": 1, "cache_positions": _POSITIONS}
    with (
        local_fleet(model, _PREFILL_AND_DECODE, **engine) as split,
        local_fleet(model, [Place("mixed-1", "mixed")], **engine) as mixed,
    ):
        for repeat in range(-1, repeats):  # the first is a warm-up
            for length in HANDED_OVER:
                prompt = [(repeat + 1) % 200] * 16 + [200] * (length - 15)  # of its own
                num_before = split.status()["counts"]["handovers"]
                times = [_seconds_to_first(one, prompt) for one in (mixed, split, split)]
                if split.status()["counts"]["handovers"] != num_before + 1:
                    raise RuntimeError(f"a prompt of {len(prompt)} tokens was not handed over once")
                if repeat >= 0:
                    seconds[length].append((times[0], times[1], times[2]))
    return [
        Handover(length, *(median(one) for one in zip(*times, strict=True)))
        for length, times in seconds.items()
    ]


def _seconds_to_first(fleet: FleetLLM, prompt: list[int]) -> float:
    """The time from the start of the only request on its last worker to its first token."""
    request = fleet.request(prompt, max_tokens=1, **_GREEDY)
    [job] = request.jobs
    times: list[float] = []

    def on_progress() -> None:  # on the fleet's thread, which owns its tasks
        if not times:
            [task] = fleet.driver.fleet.tasks.values()
            times.append(time.monotonic() - task.started)

    request.notify(on_progress)
    fleet.driver.submit(job)
    fleet.driver.advance(lambda: request.done)
    request.generation()
    return times[0]


def measure_overhead(repeats: int) -> Overhead:
    """Measure the proxy of a fleet of one worker, on a tiny model. Medians of `repeats` rounds."""
    model: str = "tiny-autoregressive"
    engine: dict[str, Any] = {"threads": 1, "cache_positions": 4096}
    found: list[tuple[float, float, float]] = []
    with (
        local_fleet(model, [Place("mixed-1", "mixed")], **engine) as fleet,
        LLM(model, draft="none", **engine) as llm,
    ):
        for repeat in range(-1, repeats):  # the first is a warm-up
            direct = median(_timed(llm, 1)[0] for _ in range(50))
            times, cpu_start = [], time.process_time()
            for _ in range(50):
                times.append(_timed(fleet, 1)[0])
            short_cpu = (time.process_time() - cpu_start) / len(times)
            num_events, cpu_start = 0, time.process_time()
            for _ in range(EVENT_ANSWERS):
                num_events += _timed(fleet, EVENT_TOKENS)[1]
            long_cpu = time.process_time() - cpu_start
            each = (long_cpu - EVENT_ANSWERS * short_cpu) / (num_events - EVENT_ANSWERS)
            if repeat >= 0:
                found.append((median(times) - direct, short_cpu, each))
    return Overhead(*(median(one) for one in zip(*found, strict=True)))


def _timed(llm: LLM, num_tokens: int) -> tuple[float, int]:
    """The duration of a request, and the number of events in which its tokens came."""
    num_events = 0

    def on_progress() -> None:
        nonlocal num_events
        num_events += 1

    start = time.perf_counter()
    request = llm.request([97], max_tokens=num_tokens, **_GREEDY)
    request.notify(on_progress)
    llm.driver.submit(request.jobs[0])
    llm.driver.advance(lambda: request.done)
    request.generation()
    return time.perf_counter() - start, num_events


def measure_systems(
    model: str, requests: list[TracedRequest], rate: float, shorten: float, limits: Limits
) -> dict[str, dict[str, float]]:
    """Serve the requests with each system of this machine, one after another. Returns their
    `latency_figures`, and the megabytes of keys and values that workers have sent each other."""
    arriving, found = arrivals(requests, rate, shorten), {}
    for name, start in _systems(model):
        with start as llm:
            before = _restored_bytes(llm)
            figures = latency_figures(served_by(llm, arriving), limits)
            figures["sent between workers, MB"] = (_restored_bytes(llm) - before) / 1e6
            found[name] = figures
    return found


def _systems(model: str) -> Iterator[tuple[str, Any]]:
    """One process with all cores, two workers without roles, and a prefill and a decode worker."""
    cores = usable_cores()
    threads = max(1, cores // 2)
    yield f"1 process, {cores} threads", _one_process(model, cores)
    mixed = [Place("mixed-1", "mixed"), Place("mixed-2", "mixed")]
    engine = {"threads": threads, "cache_positions": _POSITIONS}
    yield f"2 mixed workers, {threads} each", local_fleet(model, mixed, **engine)
    name = f"1 prefill, 1 decode, {threads} each"
    yield name, local_fleet(model, _PREFILL_AND_DECODE, **engine)


@contextmanager
def _one_process(model: str, threads: int) -> Iterator[LLM]:
    with LLM(model, draft="none", threads=threads, cache_positions=2 * _POSITIONS) as llm:
        warm_up(llm, 4)
        yield llm


def _restored_bytes(llm: LLM) -> float:
    """The size of the keys and values that the workers of a fleet have pulled from others."""
    if not isinstance(llm, FleetLLM):
        return 0.0
    time.sleep(1.0)  # until the workers have reported
    restored = sum(one["restored"] for one in llm.status()["workers"])
    return float(restored * position_bytes(llm))


def bench_fleet(
    model: Annotated[str, typer.Option("--model", "-m", help="Model.")] = "smollm2-135m-instruct",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Number of repetitions.")] = 10,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="Requests for one process, two mixed workers, and a prefill and a decode worker: a"
            " file of the Azure LLM inference traces (.csv), or of Mooncake (.jsonl).",
        ),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option("--rate", help="Requests per second; may be given several times.  [1]"),
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", min=2, help="Maximum number of requests of the trace.")
    ] = 60,
    shorten: Annotated[
        float, typer.Option("--shorten", min=1.0, help="Divide the lengths of prompts and answers.")
    ] = 8.0,
    slo: Annotated[
        str, typer.Option("--slo", help="Limits of latency, in seconds.")
    ] = "ttft=2,tpot=0.1",
    json_file: JsonFile = None,
) -> None:
    """Measure hand-overs and the proxy of fleets on this machine.

    With a trace, also serve its requests with one process on all cores, with two workers without
    roles, and with a prefill and a decode worker. The machine should be otherwise idle.

    Example: anydecode bench fleet --trace trace.csv --rate 1 --rate 2
    """
    rates = rate or [1.0]
    if not all(0 < one < float("inf") for one in rates):
        raise InvalidRequestError(f"--rate is {rates}; allowed are numbers above 0")
    objective = parse_objective(slo)
    limits = Limits(objective.ttft, objective.tpot)
    traced = [] if trace is None else read_trace(trace, requests)
    report: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "handover": [
            {**asdict(one), "ratio": one.ratio} for one in measure_handover(model, repeats)
        ],
        "overhead": asdict(measure_overhead(repeats)),
        "systems": [
            {"rate": one, "figures": measure_systems(model, traced, one, shorten, limits)}
            for one in (rates if traced else ())
        ],
    }
    write_report(report, json_file, lambda: _print(report))


def _print(report: dict[str, Any]) -> None:
    print(f"{report['cpu']}, {report['cores']} cores")
    for one in report["handover"]:
        computed, handed_over, cached = (
            1000 * one[name] for name in ("computed", "handed_over", "cached")
        )
        print(
            f"{one['tokens']} tokens of a prompt: first token after {computed:.1f} ms if computed,"
            f" {handed_over:.1f} ms if handed over, {cached:.1f} ms if cached; hand-over"
            f" {one['ratio']:.3f} of computing"
        )
    overhead = report["overhead"]
    print(
        f"proxy: {1e3 * overhead['request']:.2f} ms longer per request,"
        f" {1e3 * overhead['request_cpu']:.2f} ms of processor time;"
        f" {1e6 * overhead['event_cpu']:.0f} µs of processor time per event"
    )
    for system in report["systems"]:
        figures = system["figures"]
        print(f"at {system['rate']:g} requests/s")
        print(f"{'':30}" + "".join(f"{name:>32}" for name in figures))
        for name in next(iter(figures.values())):
            values = "".join(f"{one[name]:32.2f}" for one in figures.values())
            print(f"{name:30}{values}")
