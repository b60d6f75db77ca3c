"""xllm: its certificate, mistakes that the certificate rejects, and a fleet with faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from anydecode.cluster.control import xllm
from anydecode.cluster.control.roles import TaskNeeds, WorkerLoad
from anydecode.cluster.control.xllm import SloControl
from anydecode.cluster.fleet import MAX_PREFILLS, MIN_BLOCKS, Fleet, Member, Task, TaskState
from anydecode.cluster.routing import CachedBlocks
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, replace_class_default
from simulated_fleet import World, text


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("xllm")


_LOAD, _PLACE, _OFFERED = Fleet._load, SloControl.place, Fleet._on_offered
_MATCHED = CachedBlocks.num_matched


def _whole_score(worker: WorkerLoad, workers: Sequence[WorkerLoad]) -> float:
    matched = max(1, *(one.num_matched for one in workers))
    waiting = max(1, *(len(one.prompts) for one in workers))
    return worker.num_matched // matched - int(worker.usage) - len(worker.prompts) // waiting


def _linear(self: SloControl, rows: int, seconds: float) -> None:
    self.prompts.record((1.0, rows, 0.0), seconds)


def _fastest(self: SloControl, task: TaskNeeds, free: Sequence[WorkerLoad]) -> WorkerLoad:
    return min(free, key=self._token_seconds)


def _online(self: SloControl, now: float, task: TaskNeeds, workers: Sequence[WorkerLoad]) -> Any:
    return _PLACE(self, now, replace(task, is_offline=False), workers)


def _deepest(self: CachedBlocks, digests: Sequence[bytes]) -> int:
    return max((n + 1 for n, one in enumerate(digests) if _MATCHED(self, [one])), default=0)


def _change_at_once(self: Fleet) -> None:
    for member in self.members.values():
        if member.next_role is not None:
            member.role, member.next_role = member.next_role, None
            self.counts["role_changes"] += 1


def _by_arrival(self: Fleet, now: float) -> Iterator[Task]:
    return iter([one for one in self.tasks.values() if one.worker is None])


def _all_time_at_the_worker(self: Fleet, member: Member, *given: Any) -> None:
    member.prefilled_at = 0.0
    _OFFERED(self, member, *given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "twin"),
    [
        (xllm, "cache_score", _whole_score),
        (SloControl, "record_prompt", _linear),
        (SloControl, "_decode_worker", _fastest),
        (SloControl, "_is_light", lambda *_: False),
        (SloControl, "_takes_offline", lambda *_: True),
        (SloControl, "_is_idle_prefill", lambda *_: False),
        (Fleet, "_can_prefill", lambda self, member, now: len(member.tasks) < MAX_PREFILLS),
        (SloControl, "_may_change", lambda *_: True),
        (SloControl, "place", _online),
        (CachedBlocks, "num_matched", _deepest),
        (Fleet, "_finish_flips", _change_at_once),
        (Fleet, "_waiting", _by_arrival),
        (Fleet, "_load", lambda *given: replace(_LOAD(*given), num_positions=0)),
        (Fleet, "_on_offered", _all_time_at_the_worker),
    ],
    ids=[
        "scores in whole numbers",
        "prompts with linear times",
        "the fastest decode worker",
        "prompts that never go to decode workers",
        "offline tasks like others",
        "no offline tasks at prefill workers",
        "offline answers in the places of prompts",
        "changes of roles without a pause",
        "no offline tasks",
        "an index that counts behind a hole",
        "a change of roles before prompts are computed",
        "offline tasks of any length",
        "answers without tokens",
        "prompts that have waited at the worker",
    ],
)
def test_a_mistake_is_rejected(
    owner: Any, name: str, twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, twin)
    assert_rejected("xllm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("ttft", 0.98),
        ("ttft", 1.02),
        ("tpot", 0.049),
        ("tpot", 0.051),
        ("period", 6.0),
        ("offline", 5),
    ],
)
def test_another_default_is_rejected(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, SloControl, parameter, value)
    assert_rejected("xllm")


@pytest.mark.parametrize(
    "options",
    [{"ttft": 0.0}, {"tpot": -1.0}, {"period": -1.0}, {"policy": "load"}, {"offline": -1}],
    ids=str,
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
