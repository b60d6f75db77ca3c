"""Leap mode against the simulation of every pass, and against the law of one server."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from anydecode.cluster.simulator.leap import leap
from anydecode.cluster.simulator.simulation import Arrival, Link, WorkerPlan, simulate
from anydecode.cluster.simulator.trace_files import (
    HASHED_TOKENS,
    TracedRequest,
    arrivals,
    repeated,
)
from anydecode.errors import UnsupportedCombinationError
from anydecode.scoring.cost import CostTable

COSTS = CostTable({256: {1: 0.010, 16: 0.018, 512: 0.20}, 1024: {1: 0.012, 16: 0.024, 512: 0.30}})
LINK = Link(position_bytes=20_000, bytes_per_second=5e7, latency=0.004)
PLAN = WorkerPlan("mixed", COSTS, positions=16384)


def trace(num: int, rate: float, *, num_sessions: int = 0, seed: int = 0) -> list[TracedRequest]:
    """Requests. If there are sessions, the long prompts of a session begin alike."""
    random, time, found = Random(seed), 0.0, []
    for number in range(num):
        time += random.expovariate(rate)
        length = random.choice([20, 60, 300, 700, 1500])
        is_shared = num_sessions and length > HASHED_TOKENS
        first = number % num_sessions if is_shared else 100 + number
        more = range(1000 + 10 * number, 1000 + 10 * number + length // HASHED_TOKENS)
        blocks = (first, *more)
        found.append(TracedRequest(time, length, random.randrange(2, 60), blocks))
    return found


def exact(requests: list[TracedRequest], roles: list[str]) -> np.ndarray:
    rate = (len(requests) - 1) / (requests[-1].time - requests[0].time)
    plans = [WorkerPlan(role, COSTS, positions=16384) for role in roles]
    served = simulate(arrivals(requests, rate), plans, LINK).served
    return np.array([(one.first_token_seconds, one.seconds_per_token) for one in served])


def leaped(requests: list[TracedRequest], num: int, num_prefill: int, link: Link) -> np.ndarray:
    return np.array(leap(requests, PLAN, num, num_prefill, link))


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest relative difference of the means."""
    return float(np.abs(found.mean(0) / expected.mean(0) - 1).max())


def test_latencies_are_those_of_the_simulation_of_every_pass() -> None:
    requests = trace(24, 6.0)
    expected = exact(requests, ["mixed", "mixed"])
    assert error(leaped(requests, 2, 0, LINK), expected) < 0.03
    assert error(leaped(requests, 3, 0, LINK), expected) > 0.1


def test_prompts_are_handed_over_as_in_the_simulation_of_every_pass() -> None:
    requests = trace(24, 3.0)
    expected = exact(requests, ["prefill", "decode"])
    assert error(leaped(requests, 1, 1, LINK), expected) < 0.05
    assert error(leaped(requests, 1, 1, Link()), expected) > 0.1  # that takes no time
    assert error(leaped(requests, 2, 0, LINK), expected) > 0.1  # mixed workers


def test_durations_may_depend_on_the_rows_of_each_sequence() -> None:
    """Those of the table, which here depend on the sums of rows and positions alone."""
    requests = trace(24, 6.0)

    def seconds(counts: np.ndarray, ends: np.ndarray) -> float:
        rows = int(counts.sum())
        attended = (counts * (ends - (counts - 1) / 2)).sum()
        return COSTS.seconds(rows, int(attended / rows))

    for num, num_prefill in ((2, 0), (1, 1)):
        found = leap(requests, PLAN, num, num_prefill, LINK, span_seconds=seconds)
        assert error(np.array(found), leaped(requests, num, num_prefill, LINK)) < 0.02
    slower = leap(requests, PLAN, 2, span_seconds=lambda *spans: 2 * seconds(*spans))
    assert error(np.array(slower), leaped(requests, 2, 0, LINK)) > 0.5


def test_the_way_of_a_request_delays_its_first_token_alone() -> None:
    requests = trace(8, 6.0)
    delayed = leaped(requests, 2, 0, Link(request_seconds=0.25))
    assert np.allclose(delayed - leaped(requests, 2, 0, Link()), [0.25, 0.0])
    [first], [later] = (
        simulate([Arrival(1.0, [1, 2], 3)], [PLAN], Link(request_seconds=delay)).served
        for delay in (0.0, 0.25)
    )
    assert later.first_token_seconds == pytest.approx(first.first_token_seconds + 0.25)
    assert later.seconds_per_token == pytest.approx(first.seconds_per_token)


def test_passes_after_a_time_without_any_take_longer() -> None:
    """0.08 s after a second or more; the requests come after 0.25 s, 3 s and 0.5 s."""
    plan = replace(PLAN, pause_seconds={0.0: 0.0, 1.0: 0.08})
    seconds = COSTS.seconds(40, 20)
    times = [0.25, 0.25 + seconds + 3.02, 0.25 + 2 * seconds + 3.6]
    requests = [TracedRequest(time, 40, 1) for time in times]
    arriving = [Arrival(time, [number] * 40, 1) for number, time in enumerate(times)]
    expected = [seconds + 0.02, seconds + 0.08, seconds + 0.04]
    served = simulate(arriving, [plan]).served
    assert [one.first_token_seconds for one in served] == pytest.approx(expected)
    assert [first for first, _ in leap(requests, plan, 1)] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_sessions", [0, 10])
@pytest.mark.parametrize("roles", [["mixed"] * 4, ["prefill", "prefill", "decode", "decode"]])
def test_long_runs_agree(roles: list[str], num_sessions: int) -> None:
    requests = trace(150, 6.0, num_sessions=num_sessions, seed=2)
    num_prefill = roles.count("prefill")
    found = leaped(requests, len(roles) - num_prefill, num_prefill, LINK)
    assert error(found, exact(requests, roles)) < 0.1


def test_shared_blocks_are_computed_once() -> None:
    """And again where they do not fit into the cache."""
    shared = [TracedRequest(5.0 * number, 1024, 2, (1, 2)) for number in range(4)]
    first, *others = (one for one, _ in leap(shared, PLAN, 1))
    assert max(others) < 0.2 * first
    apart = [TracedRequest(5.0 * number, 1024, 2, (number, 9)) for number in range(4)]
    times = [one for one, _ in leap(apart, PLAN, 1)]
    assert min(times) > 0.9 * first


def test_a_single_server_is_the_queue_of_lindley() -> None:
    """One request at a time, each of one pass of 1 s."""
    second = CostTable({256: {1: 1.0, 512: 1.0}})
    worker = WorkerPlan("mixed", second, max_running=1)
    random, time, end, requests, expected = Random(0), 0.0, 0.0, [], []
    for _ in range(300):
        time += random.expovariate(0.7)
        requests.append(TracedRequest(time, 30, 1))
        end = max(time, end) + 1.0
        expected.append(end - time)
    assert [first for first, _ in leap(requests, worker, 1)] == pytest.approx(expected)


def test_tokens_of_one_answer() -> None:
    """The first comes with the prompt; the others attend to one position more each."""
    [(first, between)] = leap([TracedRequest(0.0, 100, 101)], PLAN, 1)
    assert first == pytest.approx(COSTS.seconds(100, 49))
    passes = [COSTS.seconds(1, 100 + number) for number in range(100)]
    assert between == pytest.approx(sum(passes) / 100, rel=1e-3)


def test_a_request_that_fits_nowhere_has_no_latency() -> None:
    found = leap([TracedRequest(0.0, 20_000, 2), TracedRequest(1.0, 10, 2)], PLAN, 1)
    assert found[0] == (float("inf"), float("inf")) and found[1][0] < 1


def test_other_schedules_are_refused() -> None:
    worker = WorkerPlan("mixed", COSTS, engine={"schedule": "nexus"})
    with pytest.raises(UnsupportedCombinationError, match="simulates the default schedule"):
        leap(trace(2, 1.0), worker, 1)


def test_a_repeated_trace_shares_no_blocks_with_itself() -> None:
    requests = [TracedRequest(1.0, 5, 2, (0, 7)), TracedRequest(3.0, 6, 3, (0, 8))]
    again = repeated(requests, 5)
    assert [one.time for one in again] == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert [one.num_prompt for one in again] == [5, 6, 5, 6, 5]
    assert [one.blocks for one in again[2:]] == [(9, 16), (9, 17), (18, 25)]
