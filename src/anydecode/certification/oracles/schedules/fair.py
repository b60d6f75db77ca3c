"""Oracle test of fair (virtual token counter, arXiv:2401.00588): the order of admission of two
tenants by hand, and of random requests by a simulation of the published algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.schedules.passes import passes, rows_of, same_text

TRACES, REQUESTS, RUNNING = 30, 16, 2


@oracle_test("fair")
def fair() -> Iterator[Check]:
    """One running request, and 10 + 2 * 5 = 20 units per request: many requests of one tenant do
    not delay those of another. Then random requests of three tenants."""
    tenants = ["a", "a", "a", "a", "b", "b"]
    rows = rows_of(passes("fair", [10] * 6, tokens=5, running=1, namespace=tenants))
    order = list(dict.fromkeys(request for one in rows for request in one))
    yield Check("the tenant served least is next", order == [0, 4, 1, 5, 2, 3], str(order))
    found = [_starts(_random_trace(seed)) for seed in range(TRACES)]
    wrong = sum(actual != expected for actual, expected in found)
    detail = f"{wrong} of {TRACES} traces differ"
    yield Check("admission as published, on random requests", not wrong, detail)
    yield same_text("fair")


@dataclass(frozen=True)
class _Arrival:
    """A request: its tenant, and the step before which it arrives."""

    tenant: str
    prompt: int
    output: int
    step: int


def _random_trace(seed: int) -> list[_Arrival]:
    """Requests of three tenants, in order of arrival: some wait, and some tenants are idle for a
    while. One tenant has short prompts and long answers."""
    random = np.random.default_rng((7, seed))
    steps = np.sort(random.integers(0, 60, REQUESTS))
    trace = []
    for step in steps:
        tenant = str(random.choice(["a", "a", "b", "c"]))
        prompt = int(random.integers(1, 8 if tenant == "a" else 40))
        output = int(random.integers(4, 14) if tenant == "a" else random.integers(1, 6))
        trace.append(_Arrival(tenant, prompt, output, int(step)))
    return trace


def _starts(trace: list[_Arrival]) -> tuple[list[int], list[int]]:
    """The pass in which each request of a trace starts, in the engine and by the definition."""
    rows = rows_of(
        passes(
            "fair", [one.prompt for one in trace], tokens=0, running=RUNNING,
            namespace=[one.tenant for one in trace], arrivals=[one.step for one in trace],
            max_tokens=[one.output for one in trace],
        )
    )  # fmt: skip
    first = [next(i for i, one in enumerate(rows) if n in one) for n in range(len(trace))]
    return first, _simulated(trace)


def _simulated(trace: list[_Arrival]) -> list[int]:
    """The virtual token counter: a prompt token costs 1, a generated one 2. A tenant that joins the
    queue is lifted to the smallest counter in it, or, if it is empty, to that of the tenant that
    left it last."""
    counters: dict[str, float] = {}
    queue: list[int] = []
    running: dict[int, int] = {}
    starts = [-1] * len(trace)
    last, num_passes, step = "", 0, 0
    while min(starts) < 0 or running:
        for number, one in enumerate(trace):
            if one.step != step:
                continue
            queued = {trace[other].tenant for other in queue}
            counters.setdefault(one.tenant, 0.0)
            if not queue:
                counters[one.tenant] = max(counters[one.tenant], counters.get(last, 0.0))
            elif one.tenant not in queued:
                floor = min(counters[other] for other in queued)
                counters[one.tenant] = max(counters[one.tenant], floor)
            queue.append(number)
        while queue and len(running) < RUNNING:
            number = min(queue, key=lambda n: counters[trace[n].tenant])
            queue.remove(number)
            last, running[number], starts[number] = trace[number].tenant, 0, num_passes
            counters[last] += trace[number].prompt
        num_passes += bool(running)
        for number in list(running):
            running[number] += 1
            counters[trace[number].tenant] += 2
            if running[number] == trace[number].output:
                del running[number]
        step += 1
    return starts
