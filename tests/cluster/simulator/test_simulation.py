"""A simulated fleet: the passes are those of a real engine, queues obey their laws, and prompts are
handed over."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from anydecode import LLM
from anydecode.cluster.fleet import MIN_BLOCKS
from anydecode.cluster.simulator.hollow import TableSeconds, VirtualClock
from anydecode.cluster.simulator.simulation import (
    Arrival,
    Link,
    Pass,
    Result,
    WorkerPlan,
    simulate,
)
from anydecode.engine.plan import Plan
from anydecode.memory.prefix import BLOCK
from anydecode.scoring.cost import CostTable, ThreadCosts

COSTS = CostTable({256: {1: 0.010, 16: 0.018}, 1024: {1: 0.012, 16: 0.024}})
SCHEDULES = [
    None,
    "sarathi",
    "sarathi-serve:budget=40",
    "nexus",
    "prepacking",
    "layered-prefill",
    "online-offline",
    "fair",
    "priority",
]


def trace(seed: int, num: int = 24, *, rate: float = 20.0) -> list[Arrival]:
    random = Random(seed)
    time, arrivals = 0.0, []
    for number in range(num):
        time += random.expovariate(rate)
        prompt = [number % 251, 1 + number // 251, *[7] * random.randrange(1, 150)]
        if number % 3 == 0:
            prompt = [3, *[5] * 100, *prompt]  # shared with others
        arrivals.append(Arrival(time, prompt, random.randrange(1, 12), number % 2))
    return arrivals


class RealRun:
    """A real engine that serves a trace, whose clock is the sum of the measured pass durations.

    A request whose number is a multiple of 3 arrives between two passes, another one in the middle
    of a pass; `arrivals` have the times of this run.
    """

    def __init__(self, schedule: str | None, requests: list[Arrival]) -> None:
        self.durations: list[float] = []
        self.passes: list[list[tuple[int, int, int, int]]] = []
        self.arrivals: list[Arrival] = []
        now = 0.0
        with LLM("tiny-autoregressive", threads=1, cache_positions=8192, schedule=schedule) as llm:
            model: Any = llm.model
            model.cost_table = COSTS
            self.num_layers = llm.model.spec.num_layers
            correct = llm.engine.on_pass
            numbers: dict[int, int] = {}
            jobs = []

            def on_pass(plan: Plan, seconds: float) -> None:
                assert correct is not None
                correct(plan, seconds)
                self.durations.append(seconds)
                self.passes.append(
                    [
                        (numbers[id(score.sequence.root)], rows, span.start, span.stop)
                        for score, span, rows in plan.scheduled
                    ]
                )

            llm.engine.on_pass = on_pass
            left = list(enumerate(requests))
            while left or not all(job.done for job in jobs):
                before, num_before = now, len(self.durations)
                if llm.engine.has_work:
                    llm.engine.step()
                    now += sum(self.durations[num_before:])
                for _ in range(2):
                    if left and (
                        left[0][0] % 3 or len(self.durations) % 2 or not llm.engine.has_work
                    ):
                        number, one = left.pop(0)
                        time = (before + now) / 2 if number % 3 else now
                        time = max(time, self.arrivals[-1].time if self.arrivals else 0.0)
                        arrival = Arrival(time, one.prompt, one.num_tokens, one.priority)
                        self.arrivals.append(arrival)
                        request = llm.request(
                            one.prompt,
                            decoder="autoregressive",
                            max_tokens=one.num_tokens,
                            ignore_eos=True,
                            priority=one.priority,
                        )
                        numbers[id(request.jobs[0].sequence)] = number
                        jobs.append(llm.engine.submit(request.jobs[0]))


def replay(real: RealRun, schedule: str | None, **changed: Any) -> list[list[Any]]:
    durations = iter(real.durations)
    plan: dict[str, Any] = {
        "costs": COSTS,
        "positions": 8192,
        "num_layers": real.num_layers,
        "engine": {"schedule": schedule},
        "seconds": lambda plan: next(durations, 1.0),
        **changed,
    }
    return [one.rows for one in simulate(real.arrivals, [WorkerPlan("mixed", **plan)]).passes]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_passes_are_those_of_a_real_engine(schedule: str | None) -> None:
    real = RealRun(schedule, trace(1))
    assert replay(real, schedule) == real.passes


@pytest.mark.parametrize("threads", [2, 4])
def test_two_streams_are_those_of_a_real_engine(threads: int) -> None:
    """All requests arrive at once, and both engines have the same clock."""
    slower = {256: {1: 0.030, 16: 0.054}, 1024: {1: 0.036, 16: 0.072}}
    half = {256: {1: 0.016, 16: 0.028}, 1024: {1: 0.019, 16: 0.037}}
    tables = {1: CostTable(slower), 2: CostTable(half), 4: COSTS}
    thread_costs = ThreadCosts({n: one for n, one in tables.items() if n <= threads})
    costs, schedule = tables[threads], "nexus:row_budget=48,steps=8"
    requests = [Arrival(0.0, one.prompt, one.num_tokens) for one in trace(3)]
    clock = VirtualClock(TableSeconds(costs), thread_costs)
    with LLM(
        "tiny-autoregressive", threads=threads, cache_positions=8192, schedule=schedule
    ) as llm:
        llm.engine.clock, llm.engine.on_pass = clock, None
        if threads > 2:
            llm.engine.runners["target"].thread_cost = thread_costs.seconds
        numbers = {}
        for number, one in enumerate(requests):
            [job] = llm.request(
                one.prompt, decoder="autoregressive", max_tokens=one.num_tokens, ignore_eos=True
            ).jobs
            numbers[id(job.sequence)] = number
            llm.engine.submit(job)
        while llm.engine.has_work:
            llm.engine.step()
        num_layers = llm.model.spec.num_layers
    real = [
        (
            seconds,
            [
                (numbers[id(score.sequence.root)], rows, span.start, span.stop)
                for score, span, rows in plan.scheduled
            ],
        )
        for plan, seconds in clock.launched
    ]
    worker = WorkerPlan(
        "mixed",
        costs,
        8192,
        num_layers=num_layers,
        engine={"schedule": schedule},
        thread_costs=thread_costs,
    )
    passes = simulate(requests, [worker]).passes
    assert [(one.seconds, one.rows) for one in passes] == real
    assert any(later.start < one.start + one.seconds for one, later in pairwise(passes))
    shares = simulate(requests, [replace(worker, thread_costs=None)]).passes
    assert [one.rows for one in shares] != [rows for _, rows in real]
    assert all(later.start >= one.start + one.seconds for one, later in pairwise(shares))


def test_passes_beside_each_other_share_the_memory() -> None:
    """With one of two threads a pass takes twice as long, and 1.5 times that beside another one."""
    one, both = (CostTable({256: {1: base, 48: 2 * base}}) for base in (0.02, 0.01))
    beside = CostTable({256: {1: 0.03, 48: 0.06}})
    worker = WorkerPlan(
        "mixed",
        both,
        8192,
        engine={"schedule": "nexus:row_budget=48,steps=8"},
        thread_costs=ThreadCosts({1: one, 2: both}, beside),
    )
    passes = simulate([replace(request, time=0.0) for request in trace(3)], [worker]).passes
    num_beside = 0
    for this in passes:
        is_beside = any(
            other is not this
            and other.start < this.start + this.seconds
            and this.start < other.start + other.seconds
            for other in passes
        )
        num_beside += is_beside
        table = beside if is_beside else both
        assert this.seconds == pytest.approx(table.seconds(sum(rows[1] for rows in this.rows), 256))
    assert 0 < num_beside < len(passes)


def test_the_first_use_of_a_position_of_the_cache_takes_longer() -> None:
    """Three prompts without a common block come to a cache that has room for one of them, which is
    evicted for the next one; its answer has one token, whose position is not used."""
    plan = WorkerPlan("mixed", COSTS, positions=96, first_use_seconds=0.001)
    seconds = COSTS.seconds(64, 32)
    arriving = [Arrival(float(number), [number] * 64, 1) for number in range(3)]
    found = [one.first_token_seconds for one in simulate(arriving, [plan]).served]
    assert found == pytest.approx([seconds + 0.064, seconds + 0.032, seconds])


def test_another_schedule_or_cache_has_other_passes() -> None:
    real = RealRun("sarathi-serve:budget=40", trace(1))
    assert replay(real, "sarathi:budget=40") != real.passes
    without = {"schedule": "sarathi-serve:budget=40", "row_budget": 8}
    assert replay(real, None, engine={**without, "schedule": None}) != real.passes
    assert replay(real, None, positions=512) != real.passes


def test_equal_inputs_give_equal_results() -> None:
    workers = [WorkerPlan("mixed", COSTS), WorkerPlan("mixed", COSTS)]
    assert simulate(trace(2), workers) == simulate(trace(2), workers)


def test_a_single_server_is_the_queue_of_lindley() -> None:
    """One request at a time, each of one pass."""
    random, time, arrivals = Random(0), 0.0, []
    for number in range(400):
        time += random.expovariate(0.7)
        arrivals.append(Arrival(time, [number % 256, number // 256, *[9] * 30], 1))
    worker = WorkerPlan("mixed", COSTS, max_running=1, seconds=lambda plan: 1.0)
    end, expected = 0.0, []
    for arrival in arrivals:
        end = max(arrival.time, end) + 1.0
        expected.append([end])
    assert [one.token_times for one in simulate(arrivals, [worker]).served] == expected


def test_laws_of_queues() -> None:
    """Tokens in are tokens out, no worker idles while its engine has work, and the mean number of
    requests is their rate times their mean time (Little)."""
    arrivals = trace(3, 60)
    result = simulate(arrivals, [WorkerPlan("mixed", COSTS), WorkerPlan("mixed", COSTS)])
    assert [len(one.token_times) for one in result.served] == [one.num_tokens for one in arrivals]
    for number in range(2):
        passes = [one for one in result.passes if one.worker == number]
        for one, following in zip(passes, passes[1:], strict=False):
            assert following.start >= one.start + one.seconds - 1e-9
    spans = [(one.arrival, one.token_times[-1]) for one in result.served]
    times = sorted({time for span in spans for time in span})
    area = sum(
        (end - start) * sum(first <= start < last for first, last in spans)
        for start, end in zip(times, times[1:], strict=False)
    )
    assert area == pytest.approx(sum(last - first for first, last in spans))


def long_prompts(num: int) -> list[Arrival]:
    length = 2 * BLOCK * MIN_BLOCKS + 1
    return [Arrival(2.0 * n, [n, *[1] * (length - 1)], 5) for n in range(num)]


def handed_over(link: Link) -> Result:
    workers = [WorkerPlan("prefill", COSTS), WorkerPlan("decode", COSTS)]
    return simulate(long_prompts(5), workers, link)


def test_prompts_are_handed_over_in_the_time_of_the_link() -> None:
    at_once = handed_over(Link())
    assert at_once.counts["handovers"] == 5
    by_worker = [
        sum(rows for one in at_once.passes if one.worker == worker for _, rows, _, _ in one.rows)
        for worker in (0, 1)
    ]
    length = 2 * BLOCK * MIN_BLOCKS
    assert by_worker == [5 * length, 5 * 5]  # the last row of each prompt, and 4 tokens
    slow = handed_over(Link(position_bytes=1000, bytes_per_second=1e6, latency=0.25))
    delays = [
        two.first_token_seconds - one.first_token_seconds
        for one, two in zip(at_once.served, slow.served, strict=True)
    ]
    assert delays == pytest.approx([0.25 + length * 1e-3] * 5)


def test_times_of_tokens() -> None:
    seconds = iter([1.0, 0.5, 0.25])
    worker = WorkerPlan("mixed", COSTS, seconds=lambda plan: next(seconds))
    result = simulate([Arrival(2.0, [1, 2, 3], 3)], [worker])
    [one] = result.served
    assert one.token_times == [3.0, 3.5, 3.75]
    assert (one.first_token_seconds, one.seconds_per_token) == (1.0, 0.375)
    assert result.passes[0] == Pass(0, 2.0, 1.0, [(0, 3, 0, 1)])


def test_a_request_that_no_worker_can_run_fails() -> None:
    result = simulate([Arrival(0.0, [1] * 300, 3)], [WorkerPlan("mixed", COSTS, positions=64)])
    assert "there is no worker" in (result.served[0].failure or "")


def served_images(roles: list[str], images: tuple[int, ...], **link: Any) -> Result:
    """One request with images of 10 ms per embedding."""
    plans = [WorkerPlan(role, COSTS, encode_seconds=0.01) for role in roles]
    arrivals = [Arrival(0.0, [1] * (1 + sum(images)), 1, images=images)]
    return simulate(arrivals, plans, Link(**link))


@pytest.mark.parametrize(
    ("roles", "images", "seconds"),
    [
        (["mixed"], (), 0.0),
        (["mixed"], (4, 6), 0.10),
        (["encode", "mixed"], (4, 6), 0.10),
        (["encode", "encode", "mixed"], (4, 6), 0.06),
        (["encode", "encode", "mixed"], (6, 6, 6), 0.12),
        (["encode", "encode", "mixed"], (6,), 0.06),
    ],
    ids=str,
)
def test_images_are_encoded_before_the_prompt_is_computed(
    roles: list[str], images: tuple[int, ...], seconds: float
) -> None:
    """By several workers at once, as many as there are."""
    result = served_images(roles, images)
    expected = seconds + sum(one.seconds for one in result.passes)
    assert result.served[0].first_token_seconds == pytest.approx(expected)
    assert result.counts["encodings"] == (len(images) if "encode" in roles else 0)


def test_embeddings_travel_at_the_rate_of_the_link() -> None:
    link = {"embedding_bytes": 100, "bytes_per_second": 1000.0, "latency": 0.5}
    fast, slow = (served_images(["encode", "mixed"], (4, 6), **one) for one in ({}, link))
    times = [one.served[0].first_token_seconds for one in (fast, slow)]
    assert times[1] - times[0] == pytest.approx(0.5 + 0.6)


def test_a_prompt_with_images_is_handed_over_and_nothing_encoded_twice() -> None:
    images = (BLOCK * MIN_BLOCKS,)
    result = served_images(["encode", "prefill", "decode"], images)
    assert result.counts["handovers"] == result.counts["encodings"] == 1
    expected = 0.01 * images[0] + sum(one.seconds for one in result.passes)
    assert result.served[0].first_token_seconds == pytest.approx(expected)


def test_an_encode_worker_that_is_always_busy_is_not_given_up() -> None:
    plans = [WorkerPlan(role, COSTS, encode_seconds=2.0) for role in ("encode", "mixed")]
    arrivals = [Arrival(0.0, [1, 2], 1, images=(1,)) for _ in range(80)]
    result = simulate(arrivals, plans)
    assert result.counts["lost_workers"] == 0 and result.counts["encodings"] == 80
    assert max(one.token_times[0] for one in result.served) >= 160
