"""Plans of fleets: what limits a placement moves the best one."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from anydecode import LLM
from anydecode.cluster import plan as plan_module
from anydecode.cluster.control.distserve import Limits, Placement, PlacementSearch
from anydecode.cluster.plan import CONTEXTS, MAX_EXACT_WORKERS, Machine, measured, plan
from anydecode.cluster.simulator.simulation import Link
from anydecode.cluster.simulator.trace_files import TracedRequest
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.scoring.cost import CostTable

#: A pass takes 10 ms, and each of its rows 1 ms.
COSTS = CostTable({256: {1: 0.011, 512: 0.522}})
MACHINE = Machine(COSTS, positions=8192)
SEARCH = PlacementSearch(precision=0.2)
SPLIT, MIXED = Placement(prefill=1, decode=1), Placement(mixed=2)


def trace(num: int = 60) -> list[TracedRequest]:
    random, time = Random(0), 0.0
    found = []
    for _ in range(num):
        time += random.expovariate(1.0)
        found.append(TracedRequest(time, random.randrange(150, 250), random.randrange(20, 40)))
    return found


def best(limits: Limits, link: Link = Link(), **more: Any) -> Placement:  # noqa: B008
    return plan(trace(), limits, 2, MACHINE, link, SEARCH, **more)[0].placement


@pytest.mark.slow
def test_strict_limits_between_tokens_want_roles_and_loose_ones_do_not() -> None:
    """A prompt of 200 rows delays every token beside it; where that may be, two mixed workers serve
    more than one that waits for the other."""
    assert best(Limits(ttft=2.0, tpot=0.022)) == SPLIT
    assert best(Limits(ttft=2.0, tpot=0.5)) == MIXED


@pytest.mark.slow
def test_a_slow_link_makes_roles_useless() -> None:
    slow = Link(position_bytes=1000, bytes_per_second=1e5)  # 2 s for a prompt
    assert best(Limits(ttft=1.0, tpot=0.022), slow) == MIXED


def test_a_request_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="needs 9002 positions"):
        plan([TracedRequest(0, 9000, 2)] * 2, Limits(1, 1), 2, MACHINE, Link(), SEARCH)


def test_the_lengths_of_a_trace_can_be_divided() -> None:
    requests = [TracedRequest(float(n), 9000, 20) for n in range(4)]
    found = plan(requests, Limits(9, 9), 1, MACHINE, Link(), SEARCH, shorten=10)
    assert found[0].goodput > 0


def test_the_machine_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "sleep", lambda seconds: None)
    with LLM("tiny-autoregressive", threads=1, cache_positions=2048) as llm:
        machine = measured(llm)
        spec, pool = llm.model.spec, llm.engine.runners["target"].pool
    assert machine.positions == 2048 and machine.num_layers == spec.num_layers
    layer = spec.layers[0].attention
    size = pool.cache.keys[0].dtype.itemsize
    assert machine.position_bytes == (
        2 * spec.num_layers * layer.num_kv_heads * layer.head_dim * size
    )
    assert machine.costs.seconds(512, CONTEXTS[0]) >= machine.costs.seconds(1, CONTEXTS[0]) > 0


def test_what_passes_take_in_addition_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 s per second without a pass before them, and 1 ms for each position that is new."""
    pauses, used, caches = [0.0], set[tuple[int, int]](), list[Any]()

    def timed(
        model: Any, cache: Any, count: int, context: int, clock: Any, num_logits: int
    ) -> float:
        if not any(cache is one for one in caches):
            caches.append(cache)  # which lives as long as its id is used
        start = max(0, context - count // 2)
        new = {(id(cache), start + number) for number in range(count)} - used
        used.update(new)
        return 1.0 + 0.1 * pauses[-1] + 0.001 * len(new)

    monkeypatch.setattr(plan_module, "sleep", pauses.append)
    monkeypatch.setattr(plan_module, "time_pass", timed)
    with LLM("tiny-autoregressive", threads=1, cache_positions=2048) as llm:
        machine = measured(llm)
    expected = {pause: 0.1 * pause for pause in (0.0, *plan_module.PAUSES)}
    assert machine.pause_seconds == pytest.approx(expected)
    assert machine.first_use_seconds == pytest.approx(0.001)


@pytest.mark.slow
def test_two_streams_are_measured_by_number_of_threads() -> None:
    with LLM("tiny-autoregressive", threads=2, cache_positions=2048, schedule="nexus") as llm:
        machine = measured(llm, engine={"schedule": "nexus"})
    assert machine.thread_costs is not None and set(machine.thread_costs.tables) == {1, 2}
    assert all(machine.thread_costs.contention(rows, 256) >= 1 for rows in (1, 16, 128, 512))
    assert machine.thread_costs.beside is not None
    loose = Limits(60.0, 60.0)
    [found] = plan(trace(6), loose, 1, machine, Link(), PlacementSearch(max_probes=1))
    assert found.goodput > 0


@pytest.mark.slow
def test_strict_limits_to_the_first_token_want_several_encode_workers_for_a_prompt() -> None:
    """Two images of 0.6 s each, and a pass of 0.32 s at most for the prompt."""
    machine = Machine(COSTS, positions=8192, encode_seconds=0.02)
    search = PlacementSearch(max_probes=2)
    requests = [replace(one, time=10 * one.time) for one in trace(10)]
    found = plan(requests, Limits(1.2, 1.0), 3, machine, Link(), search, images=(30, 30))
    goodputs = {str(one.placement): one.goodput for one in found}
    assert set(goodputs) == {
        "3 mixed",
        "1 prefill, 2 decode",
        "2 prefill, 1 decode",
        "1 encode, 2 mixed",
        "1 encode, 1 prefill, 1 decode",
        "2 encode, 1 mixed",
    }
    assert [one for one, goodput in goodputs.items() if goodput] == ["2 encode, 1 mixed"]


@pytest.mark.slow
def test_a_large_fleet_has_the_roles_of_a_small_one() -> None:
    search = PlacementSearch(precision=0.5)
    found = plan(trace(), Limits(2.0, 0.022), 128, MACHINE, Link(), search)
    best = found[0].placement
    assert best.workers == 128 and best.prefill and best.decode
    loose = plan(trace(), Limits(2.0, 0.5), 128, MACHINE, Link(), search)
    assert loose[0].placement == Placement(mixed=128)


def test_large_fleets_have_no_images() -> None:
    with pytest.raises(UnsupportedCombinationError, match="without --rate and --images"):
        plan(trace(), Limits(1, 1), MAX_EXACT_WORKERS + 1, MACHINE, Link(), SEARCH, images=(4,))


def test_rates_at_which_all_requests_arrive_within_the_limit_are_not_tried() -> None:
    """Four short requests at once are within the limits of one worker."""
    requests = [TracedRequest(float(n), 20, 2) for n in range(4)]
    [found] = plan(requests, Limits(0.5, 0.5), 1, MACHINE, Link(), SEARCH)
    assert 4 <= found.goodput <= 8 and not found.is_bounded
    assert max(rate for rate, _ in found.probes) <= 8
