"""`anydecode bench published-fleets`: the simulator of fleets on the settings of three papers, and
whether what they have found is found here, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import typer

from anydecode.cluster.control.distserve import Found, Latency, Limits, Placement, PlacementSearch
from anydecode.cluster.control.roles import RoleControl
from anydecode.cluster.control.xllm import SloControl
from anydecode.cluster.simulator.leap import leap
from anydecode.cluster.simulator.simulation import Link, WorkerPlan, simulate
from anydecode.cluster.simulator.trace_files import (
    TracedRequest,
    arrivals,
    read_trace,
    scaled,
)
from anydecode.engine.plan import Plan
from anydecode.report import JsonFile, write_report
from anydecode.scoring.cost import CostTable

#: Rows of a pass of engines that compute each prompt in one pass, and of one that divides prompts.
WHOLE_PROMPTS, CHUNK = 1 << 17, 512
#: Relative width of the interval in which a goodput is found. Every rate that is tried takes a
#: simulation of all passes.
PRECISION = 0.2
#: The default schedule does not read the costs of passes.
_NO_COSTS = CostTable({1: {1: 0.0, 2: 0.0}})


@dataclass(frozen=True)
class FittedSeconds:
    """The duration of passes by DistServe's fits for OPT-13B on an A100 of 80 GB, in milliseconds:
    a constant, and factors of the tokens of prompts and of the squares of their lengths; for
    answers a constant, and factors of the positions that they attend to and of their number, below
    95 answers and from there on. The constant of a pass with both is that of the prompts."""

    prompts: tuple[float, float, float] = (18.10, 0.1019, 7.12e-6)
    few: tuple[float, float, float] = (19.93, 6.27e-4, 0.0385)
    many: tuple[float, float, float] = (7.17, 5.80e-4, 0.158)

    def __call__(self, plan: Plan) -> float:
        """The duration of a pass in seconds."""
        return self.of_spans(*_spans(plan))

    def of_spans(self, counts: np.ndarray, ends: np.ndarray) -> float:
        """The duration of a pass by its sequences: the number of rows of each, and of the positions
        to which the last one attends."""
        is_prompt = counts > 1
        num_answers = int((~is_prompt).sum())
        constant, each_position, each = self.few if num_answers < 95 else self.many
        total = each_position * ends[~is_prompt].sum() + each * num_answers
        if is_prompt.any():
            starts = ends - counts
            constant, each_token, square = self.prompts
            total += each_token * counts[is_prompt].sum()
            total += square * (ends[is_prompt] ** 2 - starts[is_prompt] ** 2).sum()
        return float(constant + total) / 1000


@dataclass(frozen=True)
class RooflineSeconds:
    """The duration of passes by the operations and the bytes that they need, of which the slower
    counts.

    Attributes:
        parameters: The number of weights, of 2 bytes each.
        layers: The number of layers.
        hidden_size: The number of entries of a hidden state.
        position_bytes: Size of the keys and values of one position.
        flops: Operations per second that are reached.
        bandwidth: Bytes per second that are reached.
        constant: Seconds of each pass besides.
    """

    parameters: float
    layers: int
    hidden_size: int
    position_bytes: int
    flops: float
    bandwidth: float
    constant: float

    def __call__(self, plan: Plan) -> float:
        """The duration of a pass in seconds."""
        return self.of_spans(*_spans(plan))

    def of_spans(self, counts: np.ndarray, ends: np.ndarray) -> float:
        """The duration of a pass by its sequences: the number of rows of each, and of the positions
        to which the last one attends."""
        operations = 2 * self.parameters * float(counts.sum())
        attended = float((counts * (ends - (counts - 1) / 2)).sum())
        operations += 4 * self.layers * self.hidden_size * attended
        size = 2 * self.parameters + self.position_bytes * float(ends.sum())
        return self.constant + max(operations / self.flops, size / self.bandwidth)


def _spans(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """For each sequence of a pass the number of its rows, and of the positions to which the last
    one attends."""
    counts = np.array([count for _, _, count in plan.scheduled])
    return counts, plan.rows.prefix[np.cumsum(counts) - 1].astype(np.int64)


@dataclass(frozen=True)
class System:
    """Workers that are compared.

    Attributes:
        name: A name for people.
        placement: Their roles.
        row_budget: Maximum number of rows of a pass.
        control: Makes what changes their roles; None: they stay.
    """

    name: str
    placement: Placement
    row_budget: int = WHOLE_PROMPTS
    control: Callable[[], RoleControl] | None = None


@dataclass(frozen=True)
class Setting:
    """A published setting.

    Attributes:
        name: The method.
        published: What its paper has found.
        differs: What is not as in the paper.
        limits: The limits of latency.
        seconds: The duration of passes.
        requests: The number of requests that are simulated.
        positions: Size of the cache of a worker.
        link: The network.
        rate: The rate that the search tries first, in requests per second.
        better: The systems of which one has to have a higher goodput than each of `worse`.
        worse: The systems that it is compared with.
        others: Further systems.
        scales: Factors of the limit of the time between tokens, at each of which they are compared.
    """

    name: str
    published: str
    differs: str
    limits: Limits
    seconds: FittedSeconds | RooflineSeconds
    requests: int
    positions: int
    link: Link
    rate: float
    better: tuple[System, ...]
    worse: tuple[System, ...]
    others: tuple[System, ...] = ()
    scales: tuple[float, ...] = (1.0,)

    def goodput(self, system: System, trace: Sequence[TracedRequest]) -> Found:
        """The highest rate at which 90% of the requests of a trace are within the limits. Roles
        that change are not simulated in leap mode, nor is what they are compared with."""
        systems = (*self.better, *self.worse, *self.others)
        can_leap = all(one.control is None for one in systems)
        serve = partial(self._leap if can_leap else self._serve, system, trace)
        search = PlacementSearch(precision=PRECISION)
        return search.goodput(system.placement, self.limits, serve, self.rate, max_rate=1e3)

    def _leap(
        self, system: System, trace: Sequence[TracedRequest], placement: Placement, rate: float
    ) -> list[Latency]:
        engine = {"row_budget": system.row_budget}
        worker = WorkerPlan("mixed", _NO_COSTS, self.positions, 256, engine=engine)
        return leap(
            scaled(trace, rate),
            worker,
            placement.mixed + placement.decode,
            placement.prefill,
            self.link,
            span_seconds=self.seconds.of_spans,
        )

    def _serve(
        self, system: System, trace: Sequence[TracedRequest], _: Placement, rate: float
    ) -> list[Latency]:
        placement = system.placement
        roles = ["mixed"] * placement.mixed + ["prefill"] * placement.prefill
        roles += ["decode"] * placement.decode
        engine = {"row_budget": system.row_budget}
        workers = [
            WorkerPlan(role, _NO_COSTS, self.positions, 256, engine=engine, seconds=self.seconds)
            for role in roles
        ]
        control = None if system.control is None else system.control()
        served = simulate(arrivals(trace, rate), workers, self.link, control).served
        failed = (float("inf"), float("inf"))
        return [
            failed if one.failure else (one.first_token_seconds, one.seconds_per_token)
            for one in served
        ]


def _roles(workers: int, **options: Any) -> tuple[System, ...]:
    """All divisions of workers into prefill and decode workers."""
    placements = [Placement(prefill=n, decode=workers - n) for n in range(1, workers)]
    return tuple(System(str(one), one, **options) for one in placements)


def _mixed(workers: int) -> tuple[System, System]:
    """Mixed workers that compute each prompt in one pass, and such that divide prompts."""
    placement = Placement(mixed=workers)
    whole = System(f"{placement}, whole prompts", placement)
    return whole, System(f"{placement}, chunks of {CHUNK}", placement, CHUNK)


def distserve() -> Setting:
    """OPT-13B for conversations."""
    whole, chunked = _mixed(4)
    return Setting(
        "distserve",
        published="prefill and decode workers have a higher goodput per GPU than vLLM, which"
        " computes whole prompts between tokens (arXiv:2401.09670)",
        differs="lengths of the trace given, of requests of up to 1,024 tokens, for ShareGPT's;"
        " four workers of one GPU each, for a prefill worker of two and a decode worker of one;"
        " 50 GB/s between workers; the decode worker computes the first token",
        limits=Limits(ttft=0.25, tpot=0.1),
        seconds=FittedSeconds(),
        requests=2000,
        positions=50_000,
        link=Link(position_bytes=819_200, bytes_per_second=5e10, latency=0.001),
        rate=16.0,
        better=_roles(4),
        worse=(whole,),
        others=(chunked,),
        scales=(1.0, 0.5, 0.35),
    )


def mooncake() -> Setting:
    """Llama 2 70B on nodes of eight A800, with Mooncake's trace of conversations."""
    whole, chunked = _mixed(20)
    return Setting(
        "mooncake",
        published="up to 30 s to the first token and 0.1 s between tokens, 10 prefill and 10 decode"
        " nodes serve about 75% more requests than 20 of vLLM's (arXiv:2407.00079)",
        differs="the trace is the one published later; durations by operations and bytes, half of"
        " 8 x 312 TFLOP/s, of 8 x 2 TB/s and of 800 Gb/s; no cache in main memory, no request is"
        " rejected; more prefill than decode nodes, too",
        limits=Limits(ttft=30.0, tpot=0.1),
        seconds=RooflineSeconds(69e9, 80, 8192, 327_680, 1.25e15, 8e12, 0.01),
        requests=4000,
        positions=1_000_000,
        link=Link(position_bytes=327_680, bytes_per_second=5e10, latency=0.001),
        rate=4.0,
        better=tuple(one for one in _roles(20) if one.placement.prefill in (10, 13, 15)),
        worse=(whole,),
        others=(chunked,),
        scales=(1.0, 0.5),
    )


def xllm() -> Setting:
    """A model of 8 billion parameters on Ascend devices, with a bursty trace."""
    limits = Limits(ttft=1.0, tpot=0.05)
    placement = Placement(prefill=4, decode=4)
    fixed = System(f"{placement}, fixed", placement)
    control = partial(SloControl, limits.ttft, limits.tpot)
    dynamic = replace(fixed, name=f"{placement} at first, xllm", control=control)
    return Setting(
        "xllm",
        published="roles that follow the load serve more requests within the limits than fixed ones"
        " when the load has bursts (arXiv:2510.14686)",
        differs="durations by the rates of its cost model: 0.68 of 390 TFLOP/s, 0.58 of 1.6 TB/s,"
        " 18 ms per pass; 10 GB/s between workers; eight workers; the limits are its defaults",
        limits=limits,
        seconds=RooflineSeconds(8e9, 36, 4096, 147_456, 2.65e14, 9.3e11, 0.018),
        requests=60,
        positions=250_000,
        link=Link(position_bytes=147_456, bytes_per_second=1e10, latency=0.001),
        rate=4.0,
        better=(dynamic,),
        worse=(fixed,),
    )


def measure(setting: Setting, trace: Sequence[TracedRequest]) -> dict[str, Any]:
    """The goodput of each system of a setting, in requests per second, and whether one of those
    that should be better is better than each of the others, at each of the limits."""
    found = []
    for scale in setting.scales:
        limits = replace(setting.limits, tpot=scale * setting.limits.tpot)
        scaled_setting = replace(setting, limits=limits)
        groups = [
            {one.name: scaled_setting.goodput(one, trace).goodput for one in systems}
            for systems in (setting.better, setting.worse, setting.others)
        ]
        better, worse, _ = groups
        found.append(
            {
                "limits": asdict(limits),
                "goodput": {name: value for group in groups for name, value in group.items()},
                "is_reproduced": max(better.values()) > max(worse.values()),
            }
        )
    return {
        "setting": setting.name,
        "published": setting.published,
        "differs": setting.differs,
        "requests": len(trace),
        "found": found,
    }


def poisson(trace: Sequence[TracedRequest], max_length: int) -> list[TracedRequest]:
    """The requests of up to so many tokens, at random times with equal rates."""
    random, time, found = Random(0), 0.0, []
    for one in trace:
        if one.num_prompt + one.num_tokens <= max_length:
            found.append(replace(one, time=time))
            time += random.expovariate(1.0)
    return found


def bench_published_fleets(
    conversation: Annotated[
        Path, typer.Option("--conversation", help="The conversations of Azure's traces (.csv).")
    ],
    code: Annotated[Path, typer.Option("--code", help="The code of Azure's traces (.csv).")],
    mooncake_trace: Annotated[
        Path, typer.Option("--mooncake", help="Mooncake's trace of conversations (.jsonl).")
    ],
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            min=2,
            help="Maximum number of requests. Default: 2,000 for DistServe, 4,000 for Mooncake and"
            " 60 for xLLM, of which every pass is simulated.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Simulate fleets on published settings, and print whether the papers' order is found.

    Example: anydecode bench published-fleets --conversation conv.csv --code code.csv \
        --mooncake conversation_trace.jsonl
    """
    cases = (
        (distserve(), poisson(read_trace(conversation), 1024)),
        (mooncake(), read_trace(mooncake_trace)),
        (xllm(), read_trace(code)),
    )
    report = {
        "settings": [
            measure(setting, trace[: min(requests or setting.requests, setting.requests)])
            for setting, trace in cases
        ]
    }
    write_report(report, json_file, lambda: _print(report))


def _print(report: dict[str, Any]) -> None:
    for one in report["settings"]:
        print(f"{one['setting']}: {one['requests']} requests, goodput in requests/s")
        print(f"published: {one['published']}")
        print(f"differs: {one['differs']}")
        for name in one["found"][0]["goodput"]:
            print(f"  {name:36}" + "".join(f"{at['goodput'][name]:10.3g}" for at in one["found"]))
        for what in ("ttft", "tpot"):
            limits = "".join(f"{at['limits'][what]:10.3g}" for at in one["found"])
            print(f"  {f'within {what}':36}{limits}")
        answers = ("yes" if at["is_reproduced"] else "no" for at in one["found"])
        print(f"  {'found here':36}" + "".join(f"{answer:>10}" for answer in answers) + "\n")
