"""Plans a fleet for a trace: simulates placements of workers and finds the best one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from time import perf_counter, sleep
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.cluster.control.distserve import (
    Found,
    Latency,
    Limits,
    Placement,
    PlacementSearch,
    placements,
    units,
)
from anydecode.cluster.simulator.leap import leap
from anydecode.cluster.simulator.simulation import Arrival, Link, Served, WorkerPlan, simulate
from anydecode.cluster.simulator.trace_files import TracedRequest, arrivals, repeated, scaled
from anydecode.engine.costs import busy_seconds, computing, measure, time_pass
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.patch_encoder import PatchEncoder
from anydecode.scoring.cost import CostTable, ThreadCosts
from anydecode.scoring.sequence import TARGET

#: Numbers of rows, and of positions that they attend to, at which the passes of a model are
#: measured for a plan: more than a schedule needs, since whole prompts are simulated.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (64, 256, 1024, 2048)
#: Of these, the one at which passes are measured with each number of threads, and whole answers.
CONTEXT = 256
#: The numbers of rows of these passes that are measured with each number of threads: of passes of
#: answers, and of prompts.
ANSWER_ROWS, PROMPT_ROWS = (1, 16), (128, 512)
#: Times without a pass after which passes are measured, in seconds, with so many rows, so often.
PAUSES, PAUSE_ROWS, PAUSE_ROUNDS = (0.3, 1.5), 64, 5
#: Number of positions of the cache that are used for the first time in a pass, so often.
FIRST_USED, FIRST_USE_ROUNDS = 128, 5
#: Larger fleets are simulated in leap mode.
MAX_EXACT_WORKERS = 64
#: A plan of a larger fleet compares all placements of so many workers, and the best ones at the
#: size of the fleet.
SMALL_WORKERS = 16
NUM_BEST = 2
#: Minimum number of requests per worker of a simulation in leap mode. The trace is repeated until
#: it has them, and until it lasts for `LEAP_SPAN` times the limit of the time to the first token.
LEAP_REQUESTS = 20
LEAP_SPAN = 5
#: Answers at a time at which the work besides that of a prompt's rows is measured.
_NUM_ANSWERS = 16
_FAILED: Latency = (float("inf"), float("inf"))


@dataclass(frozen=True)
class Machine:
    """What a worker is, as far as a plan depends on it.

    Attributes:
        costs: The costs of its passes.
        positions: Size of its cache.
        position_bytes: Size of the keys and values of one position.
        num_layers: The layers of the model.
        max_running: Maximum number of its answers.
        engine: Further options of `LLM`, such as `schedule`.
        pass_seconds: The duration of each pass besides that of `costs`.
        answer_seconds: The same for each sequence of a pass.
        encode_seconds: The time to encode an image, per embedding.
        embedding_bytes: Size of one embedding.
        thread_costs: The costs of passes by number of threads, if the schedule runs two at a time.
        pause_seconds: What a pass takes in addition, by the seconds without a pass before it.
        first_use_seconds: What it takes in addition for each position of the cache that it is the
            first to use: memory that was never written is not there yet.
    """

    costs: CostTable
    positions: int
    position_bytes: int = 0
    num_layers: int = 1
    max_running: int = 64
    engine: dict[str, Any] = field(default_factory=dict)
    pass_seconds: float = 0.0
    answer_seconds: float = 0.0
    encode_seconds: float = 0.0
    embedding_bytes: int = 0
    thread_costs: ThreadCosts | None = None
    pause_seconds: Mapping[float, float] = field(default_factory=dict)
    first_use_seconds: float = 0.0


def measured(llm: LLM, **options: Any) -> Machine:
    """The machine of a worker that runs `llm`: its passes are measured, which takes from seconds
    to minutes.

    Args:
        llm: The model and its engine.
        **options: Of `Machine`.
    """
    hidden_size = llm.model.spec.hidden_size
    thread_costs = _thread_costs(llm)
    # Of a prompt's rows only the last one has logits; those of answers are part of
    # `answer_seconds`. Passes will take what they take on average, not what the fastest one takes.
    costs = measure(
        _alone(llm),
        ROWS,
        CONTEXTS,
        max_seconds=float("inf"),
        num_logits=1,
        of_rounds=mean,
    )
    few, many = (_seconds_besides(llm, costs, num) for num in (1, _NUM_ANSWERS))
    each = max(0.0, (many - few) / (_NUM_ANSWERS - 1))
    return Machine(
        costs,
        llm.engine.runners[TARGET].pool.num_slots,
        position_bytes(llm),
        llm.model.spec.num_layers,
        pass_seconds=max(0.0, few - each),
        answer_seconds=each,
        encode_seconds=_encode_seconds(PatchEncoder(hidden_size)),
        embedding_bytes=4 * hidden_size,
        thread_costs=thread_costs,
        pause_seconds=_pause_seconds(_alone(llm)),
        first_use_seconds=_first_use_seconds(_alone(llm)),
        **options,
    )


def position_bytes(llm: LLM) -> int:
    """Size of the keys and values of one position in the cache of `llm`."""
    arrays = llm.engine.runners[TARGET].pool.cache.arrays
    return sum(one.nbytes // one.shape[0] for one in arrays if one.shape[0])


def _alone(llm: LLM) -> Any:
    """The model that runs a pass with all threads."""
    model: Any = llm.engine.runners[TARGET].model
    if llm.engine.runners[TARGET].prompts is not None:
        model.executor.threads_in_use = model.executor.threads
    return model


def _thread_costs(llm: LLM) -> ThreadCosts | None:
    """The costs of passes with 1, 2, 4, ... and all threads, if prompts run in passes of their own.
    They are measured by the wall clock, as the threads of the executor that wait use the
    processor."""
    runner = llm.engine.runners[TARGET]
    if runner.prompts is None:
        return None
    model: Any = runner.model
    executor = model.executor
    counts = {executor.threads, *(1 << i for i in range(executor.threads.bit_length()))}
    tables = {}
    for count in sorted(counts):
        executor.threads_in_use = count
        tables[count] = _by_wall_clock(model, ANSWER_ROWS + PROMPT_ROWS)
    return ThreadCosts(tables, _beside(model, runner.prompts.model, executor.threads // 2))


def _beside(of_answers: Any, of_prompts: Any, threads: int) -> CostTable:
    """The costs of passes with so many threads while as many compute a pass of the other kind."""
    found: dict[int, float] = {}
    kinds = (of_answers, ANSWER_ROWS), (of_prompts, PROMPT_ROWS)
    for (model, rows), (other, other_rows) in (kinds, kinds[::-1]):
        model.executor.threads_in_use = other.executor.threads_in_use = threads
        with computing(other, other_rows[-1], CONTEXT):
            [of_rows] = _by_wall_clock(model, rows).seconds_by.values()
        found.update(of_rows)
    return CostTable({CONTEXT: found})


def _by_wall_clock(model: Any, rows: tuple[int, ...]) -> CostTable:
    return measure(
        model,
        rows,
        (CONTEXT,),
        clock=lambda model: perf_counter(),
        max_seconds=float("inf"),
        num_logits=1,
        of_rounds=mean,
    )


def _pause_seconds(model: Any) -> dict[float, float]:
    """What a pass takes in addition after so many seconds without one: a processor may have slowed
    down, and takes some time to be as fast as before, whatever it computes."""
    cache = model.new_cache(CONTEXT + PAUSE_ROWS)
    times: dict[float, list[float]] = {one: [] for one in (*PAUSES, 0.0)}
    for _ in range(PAUSE_ROUNDS):
        for pause, found in times.items():
            sleep(pause)
            found.append(
                time_pass(model, cache, PAUSE_ROWS, PAUSE_ROWS, lambda _: perf_counter(), 1)
            )
    without = median(times[0.0])
    return {pause: max(0.0, median(found) - without) for pause, found in times.items()}


def _first_use_seconds(model: Any) -> float:
    """What a pass takes in addition per position of the cache that is used for the first time: the
    system provides its memory then."""
    cache, differences = model.new_cache(FIRST_USED * (FIRST_USE_ROUNDS + 1)), []
    if not all(isinstance(one, np.ndarray) for one in cache.arrays):
        return 0.0  # memory of a GPU
    num_rounds = min(FIRST_USE_ROUNDS + 1, model.spec.max_positions // FIRST_USED)
    for number in range(num_rounds):
        context = FIRST_USED * number + FIRST_USED // 2  # of the positions behind those in use
        first, again = (
            time_pass(model, cache, FIRST_USED, context, busy_seconds, 1) for _ in range(2)
        )
        differences.append(first - again)
    return max(0.0, mean(differences[1:] or [0.0])) / FIRST_USED


def _seconds_besides(llm: LLM, costs: CostTable, num: int) -> float:
    """What a pass over so many answers takes besides the rows of `costs`: further logits, the
    schedule, sampling, stop conditions. The median of 32 passes, in seconds of processor time."""
    length = min(CONTEXT, llm.model.spec.max_positions // 2) - 16
    jobs = [
        llm.request(
            [1 + number] * length, decoder="autoregressive", max_tokens=33, ignore_eos=True
        ).jobs[0]
        for number in range(num)
    ]
    for job in jobs:
        llm.engine.submit(job)
    times = []
    while not all(job.done for job in jobs):
        start = busy_seconds(llm.model)
        llm.engine.step()
        times.append(busy_seconds(llm.model) - start)
    executor = getattr(llm.model, "executor", None)
    threads = getattr(executor, "threads", 1)
    return threads * (median(times[-32:]) - costs.seconds(num, length + 16))


def _encode_seconds(encoder: PatchEncoder) -> float:
    """The time to encode an image, per embedding: the median of several images."""
    side, times = 8 * encoder.patch, []
    for _ in range(5):
        start = perf_counter()
        rows = encoder.encode(np.zeros((side, side, 3), np.uint8))
        times.append((perf_counter() - start) / len(rows))
    return median(times)


def plan(
    trace: Sequence[TracedRequest],
    limits: Limits,
    workers: int,
    machine: Machine,
    link: Link,
    search: PlacementSearch,
    *,
    shorten: float = 1.0,
    can_replicate: bool = False,
    images: tuple[int, ...] = (),
) -> list[Found]:
    """The goodput of each placement of workers, that with the most per worker first.

    More than `MAX_EXACT_WORKERS` workers are simulated in leap mode: all placements of
    `SMALL_WORKERS` workers, then the best `NUM_BEST` of them with all workers.

    Args:
        trace: The requests.
        limits: The latency limits.
        workers: The number of workers, each on a machine of its own.
        machine: What each of them is.
        link: The network between them.
        search: The search.
        shorten: A divisor of all lengths.
        can_replicate: Whether fewer workers may be placed, as a unit of which there are several.
        images: The number of embeddings of each image. Every prompt has these images before its
            tokens.

    Raises:
        InvalidRequestError: A request does not fit into a worker's cache.
        UnsupportedCombinationError: The fleet is too large for replicas, images or the schedule.
    """
    longest = max(one.num_prompt + one.num_tokens for one in scaled(trace, 1.0, shorten))
    needed = longest + sum(images)
    if needed > machine.positions:
        raise InvalidRequestError(
            f"a request of the trace needs {needed} positions, and a worker has"
            f" {machine.positions}: raise --cache-positions, or divide the lengths by --shorten"
        )
    span = trace[-1].time - trace[0].time
    rate = (len(trace) - 1) / span if span > 0 else 1.0
    if workers > MAX_EXACT_WORKERS:
        if can_replicate or images:
            raise UnsupportedCombinationError(
                f"{workers} workers are planned without --rate and --images: leave them out, or"
                f" give up to {MAX_EXACT_WORKERS} workers"
            )
        return _plan_large(trace, limits, workers, machine, link, search, shorten, rate)

    def serve(placement: Placement, rate: float) -> list[Latency]:
        arriving = [
            _with_images(number, one, images)
            for number, one in enumerate(arrivals(trace, rate, shorten))
        ]
        result = simulate(arriving, _workers(placement, machine), link)
        return [_latency(one) for one in result.served]

    candidates = (units if can_replicate else placements)(workers, bool(images))
    # At which all requests arrive within the limit; higher rates tell nothing about longer traces.
    max_rate = max(rate, len(trace) / limits.ttft)
    return search.search(candidates, limits, serve, rate, max_rate)


def _plan_large(
    trace: Sequence[TracedRequest],
    limits: Limits,
    workers: int,
    machine: Machine,
    link: Link,
    search: PlacementSearch,
    shorten: float,
    rate: float,
) -> list[Found]:
    """`plan` in leap mode."""
    worker = worker_plan("mixed", machine)

    def serve(placement: Placement, rate: float) -> list[Latency]:
        longest = LEAP_SPAN * limits.ttft * rate
        num = max(len(trace), LEAP_REQUESTS * placement.workers, math.ceil(longest))
        requests = scaled(repeated(trace, num), rate, shorten)
        num_generating = placement.mixed + placement.decode
        return leap(requests, worker, num_generating, placement.prefill, link, shorten)

    small = search.search(placements(SMALL_WORKERS), limits, serve, rate)
    factor = workers / SMALL_WORKERS
    found = [
        search.goodput(_enlarged(one.placement, workers), limits, serve, factor * one.goodput)
        for one in small[:NUM_BEST]
        if one.goodput
    ]
    return sorted(found, key=lambda one: -one.goodput_per_worker) or small


def _enlarged(placement: Placement, workers: int) -> Placement:
    """The placement of so many workers with about the same shares of roles."""
    if placement.mixed:
        return Placement(mixed=workers)
    prefill = round(workers * placement.prefill / placement.workers)
    return Placement(prefill=prefill, decode=workers - prefill)


def _with_images(number: int, one: Arrival, images: tuple[int, ...]) -> Arrival:
    """A request whose prompt begins with images that no other one has."""
    if not images:
        return one
    first = [number % 251, number // 251 % 251, *[0] * (sum(images) - 2)][: sum(images)]
    return replace(one, prompt=first + one.prompt, images=images)


def _workers(placement: Placement, machine: Machine) -> list[WorkerPlan]:
    roles = (
        ["encode"] * placement.encode
        + ["mixed"] * placement.mixed
        + ["prefill"] * placement.prefill
        + ["decode"] * placement.decode
    )
    return [worker_plan(role, machine) for role in roles]


def worker_plan(role: str, machine: Machine) -> WorkerPlan:
    """A worker of a simulated fleet that is such a machine."""
    return WorkerPlan(
        role,
        machine.costs,
        machine.positions,
        machine.max_running,
        machine.num_layers,
        machine.engine,
        machine.pass_seconds,
        machine.answer_seconds,
        encode_seconds=machine.encode_seconds,
        thread_costs=machine.thread_costs,
        pause_seconds=machine.pause_seconds,
        first_use_seconds=machine.first_use_seconds,
    )


def _latency(one: Served) -> Latency:
    return _FAILED if one.failure else (one.first_token_seconds, one.seconds_per_token)
