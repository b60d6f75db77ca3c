"""xllm: its certificate, mistakes that the certificate rejects, and a fleet with faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from anydecode.cluster.control import xllm
from anydecode.cluster.control.roles import TaskNeeds, WorkerLoad
from anydecode.cluster.control.xllm import SloControl
from anydecode.cluster.fleet import MIN_BLOCKS, Fleet, Member, TaskState
from anydecode.cluster.routing import CachedBlocks
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, replace_class_default
from simulated_fleet import World, text


@pytest.mark.slow
def test_the_certificate() -> None:
    assert_certified("xllm")


@pytest.mark.slow
def test_scores_in_whole_numbers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(worker: WorkerLoad, workers: Sequence[WorkerLoad]) -> float:
        matched = max(1, *(one.num_matched for one in workers))
        waiting = max(1, *(len(one.prompts) for one in workers))
        return worker.num_matched // matched - int(worker.usage) - len(worker.prompts) // waiting

    monkeypatch.setattr(xllm, "cache_score", score)
    assert_rejected("xllm")


@pytest.mark.slow
def test_prompts_with_linear_times_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SloControl,
        "record_prompt",
        lambda self, rows, seconds: self.prompts.record((1.0, rows, 0.0), seconds),
    )
    assert_rejected("xllm")


@pytest.mark.slow
def test_the_fastest_decode_worker_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def fastest(self: Any, task: TaskNeeds, free: Sequence[WorkerLoad]) -> WorkerLoad:
        return min(free, key=self._token_seconds)

    monkeypatch.setattr(SloControl, "_decode_worker", fastest)
    assert_rejected("xllm")


@pytest.mark.slow
def test_prompts_that_never_go_to_decode_workers_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SloControl, "_is_light", lambda *_: False)
    assert_rejected("xllm")


@pytest.mark.slow
def test_offline_tasks_like_others_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SloControl, "_takes_offline", lambda *_: True)
    assert_rejected("xllm")


@pytest.mark.slow
def test_a_change_of_roles_before_prompts_are_computed_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at_once(self: Fleet) -> None:
        for member in self.members.values():
            if member.next_role is not None:
                member.role, member.next_role = member.next_role, None
                self.counts["role_changes"] += 1

    monkeypatch.setattr(Fleet, "_finish_flips", at_once)
    assert_rejected("xllm")


@pytest.mark.slow
def test_changes_of_roles_without_a_pause_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SloControl, "_may_change", lambda *_: True)
    assert_rejected("xllm")


@pytest.mark.slow
def test_an_index_that_counts_behind_a_hole_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    matched = CachedBlocks.num_matched

    def deepest(self: CachedBlocks, digests: Sequence[bytes]) -> int:
        return max((n + 1 for n, one in enumerate(digests) if matched(self, [one])), default=0)

    monkeypatch.setattr(CachedBlocks, "num_matched", deepest)
    assert_rejected("xllm")


_LOAD, _PLACE, _OFFERED = Fleet._load, SloControl.place, Fleet._on_offered


def _all_time_at_the_worker(self: Fleet, member: Member, *given: Any) -> None:
    member.prefilled_at = 0.0
    _OFFERED(self, member, *given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "twin"),
    [
        (
            Fleet,
            "_waiting",
            lambda self, now: iter([one for one in self.tasks.values() if one.worker is None]),
        ),
        (Fleet, "_load", lambda *given: replace(_LOAD(*given), num_positions=0)),
        (Fleet, "_on_offered", _all_time_at_the_worker),
        (
            SloControl,
            "place",
            lambda self, now, task, workers: _PLACE(
                self, now, replace(task, is_offline=False), workers
            ),
        ),
    ],
    ids=[
        "offline tasks of any length",
        "answers without tokens",
        "prompts that have waited at the worker",
        "no offline tasks",
    ],
)
def test_a_mistake_in_what_a_fleet_tells_its_control_is_rejected(
    owner: Any, name: str, twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, twin)
    assert_rejected("xllm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameter", "value"),
    [("ttft", 0.98), ("ttft", 1.02), ("tpot", 0.049), ("tpot", 0.051), ("period", 6.0)],
)
def test_another_default_is_rejected(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, SloControl, parameter, value)
    assert_rejected("xllm")


@pytest.mark.parametrize(
    "options", [{"ttft": 0.0}, {"tpot": -1.0}, {"period": -1.0}, {"policy": "load"}], ids=str
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="xllm has .* allowed are"):
        SloControl(**options)


def test_workers_that_are_lost_while_roles_change_change_no_answer() -> None:
    """No worker is ever within the limits, so roles change all the time; every five seconds the
    worker with the most tasks is lost, whatever it does, and another one comes."""
    world = World()
    control = world.fleet.control = SloControl(ttft=1e-6, tpot=1e-6, period=0.0)
    for role in ("prefill", "prefill", "prefill", "decode", "decode"):
        world.join(role)
    numbers, states = list[int](), set[TaskState]()
    for second in range(60):
        numbers += [world.submit(num_blocks=blocks) for blocks in (MIN_BLOCKS, MIN_BLOCKS + 1, 0)]
        world.settle(0.5)
        if second % 5 == 4:
            lost = max(world.fleet.members.values(), key=lambda one: len(one.tasks))
            states |= {task.state for task in lost.tasks.values()}
            world.crash(lost.facts.incarnation)
            world.join(("prefill", "decode")[second % 2])
        world.check()
    world.settle(60)
    assert control.prompts.is_known and control.tokens.is_known
    assert TaskState.DECODING in states
    assert world.fleet.counts["role_changes"] > 3 and world.fleet.counts["lost_workers"] == 12
    assert not world.fleet.tasks
    assert all(world.received[one] == text(one) for one in numbers)
