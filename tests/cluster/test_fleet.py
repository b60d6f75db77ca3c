"""The state machines of proxy and workers, over a network that loses, doubles and delays frames,
and with workers that crash: every task ends once, with its tokens, and nothing is left behind."""

from __future__ import annotations

from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from anydecode.cluster import fleet as fleet_module
from anydecode.cluster.fleet import (
    DEAD_SECONDS,
    MAX_DEATHS,
    MAX_LOSSES,
    MIN_BLOCKS,
    Deliver,
    Expel,
    Fail,
    Finish,
    Fleet,
    SendTo,
    Task,
    WorkerFacts,
)
from anydecode.cluster.leases import LEASE_SECONDS, Key
from anydecode.cluster.ledger import Abort, Frame, Ledger, Pull, Send, Start, StartPrefill
from anydecode.memory.prefix import BLOCK, block_digests


def text(number: int) -> list[int]:
    """The right answer to a task."""
    return [(31 * number + 7 * position) % 101 for position in range(3 + number % 5)]


class SimulatedWorker:
    """A ledger with an engine that gives the right tokens, one at a time."""

    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts
        self.ledger = Ledger(facts.incarnation, facts.max_running, facts.positions)
        self.running: dict[Key, int] = {}  # position of the next token
        self.prefilling: list[Key] = []
        self.num_passes = 0

    def progress(self, now: float) -> None:
        """One pass."""
        self.num_passes += 1
        for key in self.prefilling:
            self.ledger.prefilled(key, 4, 10, now)
        self.prefilling.clear()
        for key, position in list(self.running.items()):
            answer = text(key[0])
            if position < len(answer):
                self.ledger.produced(key, [answer[position]])
                self.running[key] = position + 1
            else:
                del self.running[key]
                self.ledger.ended(key, finish="stop")


class World:
    """A fleet, its workers, the frames on their way, and what clients have received."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fleet = Fleet()
        self.workers: dict[str, SimulatedWorker] = {}
        self.frames: list[tuple[str, bool, Frame]] = []  # incarnation, to the worker, frame
        self.received: dict[int, list[int]] = {}
        self.ends: dict[int, list[Any]] = {}
        self.cancelled: set[int] = set()
        self._numbers = count()

    def join(self, role: str = "mixed", group: str = "g", positions: int = 2000) -> str:
        incarnation = f"w{next(self._numbers)}"
        facts = WorkerFacts(incarnation, incarnation, role, group, (incarnation, 1), 3, positions)
        self.workers[incarnation] = SimulatedWorker(facts)
        assert self.fleet.join(facts, self.now) is None
        self.act()
        return incarnation

    def crash(self, incarnation: str) -> None:
        del self.workers[incarnation]
        self.fleet.leave(incarnation, self.now)
        self.act()

    def submit(self, num_blocks: int = 0, is_resumable: bool = True) -> int:
        number = next(self._numbers)
        prompt = [number] * (BLOCK * num_blocks + 1)
        task = Task(
            number,
            prompt,
            max_tokens=50,
            message={"options": {}},
            digests=block_digests("", prompt[:-1]),
            is_resumable=is_resumable,
        )
        self.received[number], self.ends[number] = [], []
        self.fleet.submit(task, self.now)
        self.act()
        return number

    def cancel(self, number: int) -> None:
        self.cancelled.add(number)
        self.fleet.cancel(number, self.now)
        self.act()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.workers.values():
            worker.ledger.beat(self.now, passes=worker.num_passes)
        self.fleet.tick(self.now)
        self.act()

    def deliver(self, index: int) -> None:
        incarnation, is_to_worker, frame = self.frames.pop(index)
        if not is_to_worker:
            self.fleet.receive(incarnation, frame, self.now)
        elif incarnation in self.workers and frame["type"] != "stop":
            self.workers[incarnation].ledger.handle(frame)
        self.act()

    def act(self) -> None:
        """Do what the state machines ask for, until they ask for nothing."""
        while self.fleet.actions or any(one.ledger.actions for one in self.workers.values()):
            actions, self.fleet.actions = self.fleet.actions, []
            for action in actions:
                self._act_for_proxy(action)
            for worker in list(self.workers.values()):
                of_worker, worker.ledger.actions = worker.ledger.actions, []
                for one in of_worker:
                    self._act_for_worker(worker, one)

    def _act_for_proxy(self, action: Any) -> None:
        if isinstance(action, SendTo):
            self.frames.append((action.incarnation, True, action.frame))
        elif isinstance(action, Deliver):
            self.received[action.task] += action.tokens
        elif isinstance(action, Finish | Fail):
            self.ends[action.task].append(action)
        elif isinstance(action, Expel):
            self.workers.pop(action.incarnation, None)

    def _act_for_worker(self, worker: SimulatedWorker, action: Any) -> None:
        if isinstance(action, Send):
            self.frames.append((worker.facts.incarnation, False, action.frame))
        elif isinstance(action, Start):
            worker.running[action.key] = len(action.frame["said"])
        elif isinstance(action, StartPrefill):
            worker.prefilling.append(action.key)
        elif isinstance(action, Pull):
            giver = self.workers.get(action.source["address"][0])
            if giver is not None:
                key, holder = (action.key[0], action.source["attempt"]), worker.facts.incarnation
                if giver.ledger.leases.reserve(key, holder, self.now):
                    assert giver.ledger.leases.pull(key, holder, self.now)
                    giver.ledger.leases.acknowledge(key, holder)
            worker.ledger.pulled(action.key)
        elif isinstance(action, Abort):
            worker.running.pop(action.key, None)
            if action.key in worker.prefilling:
                worker.prefilling.remove(action.key)

    def settle(self, seconds: float) -> None:
        """Let time pass without faults."""
        stop = self.now + seconds
        while self.now < stop:
            self.advance(0.5)
            for worker in list(self.workers.values()):
                worker.progress(self.now)
            self.act()
            while self.frames:
                self.deliver(0)

    def check(self) -> None:
        """What holds at every time."""
        for number, tokens in self.received.items():
            assert tokens == text(number)[: len(tokens)]
            assert len(self.ends[number]) <= 1
            has_ended = bool(self.ends[number]) or number in self.cancelled
            assert has_ended == (number not in self.fleet.tasks)
            if self.ends[number] and isinstance(self.ends[number][0], Finish):
                assert tokens == text(number)
        on_workers = [task for one in self.fleet.members.values() for task in one.tasks.values()]
        assert len(on_workers) == len({task.number for task in on_workers})
        for member in self.fleet.members.values():
            for task in member.tasks.values():
                assert task.worker == member.facts.incarnation


class FleetMachine(RuleBasedStateMachine):
    """Faults in any order, and then none."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.join("mixed")
        self.world.join("prefill")

    @rule(num_blocks=st.sampled_from([0, MIN_BLOCKS]), is_resumable=st.booleans())
    def submit(self, num_blocks: int, is_resumable: bool) -> None:
        self.world.submit(num_blocks, is_resumable)

    @precondition(lambda self: self.world.fleet.tasks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.fleet.tasks))))

    @rule(random=st.randoms(use_true_random=False), faults=st.sampled_from([0.0, 0.2, 0.5]))
    def exchange(self, random: Random, faults: float) -> None:
        """A pass of some workers; then the frames on their way arrive, or are lost, doubled or
        late."""
        world = self.world
        for worker in list(world.workers.values()):
            if random.random() < 0.8:
                worker.progress(world.now)
        world.act()
        late = []
        while world.frames:
            index = 0 if random.random() >= faults else random.randrange(len(world.frames))
            fate = random.random() / faults if faults else 3.0
            if fate < 0.3:
                world.frames.pop(index)
            elif fate < 0.6:
                late.append(world.frames.pop(index))
            else:
                if fate < 1.0:
                    late.append(world.frames[index])
                world.deliver(index)
        world.frames += late

    @rule(seconds=st.sampled_from([0.1, 0.6, LEASE_SECONDS + 1]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: len(self.world.workers) > 1)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.world.crash(data.draw(st.sampled_from(sorted(self.world.workers))))

    @precondition(lambda self: len(self.world.workers) < 4)
    @rule(role=st.sampled_from(["mixed", "prefill", "decode"]))
    def join(self, role: str) -> None:
        self.world.join(role)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.join("mixed")
        self.world.settle(LEASE_SECONDS + DEAD_SECONDS + 60)
        self.world.check()
        assert not self.world.fleet.tasks
        for worker in self.world.workers.values():
            assert not worker.ledger.tasks and not worker.running and not worker.prefilling
            assert len(worker.ledger.leases) == 0


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


_ON_TOKENS, _ON_ENDED = Fleet._on_tokens, Fleet._on_ended


def _takes_all_tokens(self: Fleet, member: Any, task: Task, frame: Frame, now: float) -> None:
    _ON_TOKENS(self, member, task, {**frame, "start": task.num_received}, now)


def _misses_lost_tokens(self: Fleet, member: Any, task: Task, frame: Frame, now: float) -> None:
    _ON_ENDED(self, member, task, {**frame, "count": task.num_received}, now)


@pytest.mark.parametrize(
    ("name", "twin"),
    [("_on_tokens", _takes_all_tokens), ("_on_ended", _misses_lost_tokens)],
)
def test_wrong_twins_are_found(name: str, twin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, name, twin)
    thorough = settings(
        max_examples=200,
        stateful_step_count=40,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(FleetMachine, settings=thorough)


def test_a_prompt_is_handed_over_under_a_lease() -> None:
    world = World()
    world.join("prefill")
    world.join("decode")
    number = world.submit(num_blocks=MIN_BLOCKS)
    world.settle(10)
    assert world.received[number] == text(number)
    assert world.fleet.counts["handovers"] == 1
    assert all(len(one.ledger.leases) == 0 for one in world.workers.values())


def test_a_short_prompt_is_not_handed_over() -> None:
    world = World()
    world.join("prefill")
    world.join("decode")
    world.submit(num_blocks=MIN_BLOCKS - 1)
    world.settle(10)
    assert world.fleet.counts["handovers"] == 0


def test_blocks_do_not_move_between_groups() -> None:
    world = World()
    world.join("prefill", group="other")
    world.join("decode")
    number = world.submit(num_blocks=MIN_BLOCKS)
    world.settle(10)
    assert world.received[number] == text(number)
    assert world.fleet.counts["handovers"] == 0


def test_an_answer_never_changes_its_group() -> None:
    world = World()
    first = world.join()
    number = world.submit()
    world.deliver(0)
    world.workers[first].progress(world.now)
    world.act()
    while world.frames:
        world.deliver(0)
    assert world.received[number]
    world.join(group="other")
    world.crash(first)
    world.settle(fleet_module.PATIENCE_SECONDS - 5)
    assert number in world.fleet.tasks
    world.settle(10)
    [end] = world.ends[number]
    assert "no worker of the group that has begun the answer" in end.message


def test_a_task_that_is_on_dying_workers_is_given_up() -> None:
    world = World()
    number = world.submit()
    for _ in range(MAX_DEATHS):
        world.crash(world.join())
    world.join()
    [end] = world.ends[number]
    assert isinstance(end, Fail) and "the worker" in end.message


def test_a_task_whose_frames_are_always_lost_is_given_up() -> None:
    world = World()
    world.join()
    number = world.submit()
    for _ in range(2 * MAX_LOSSES + 4):
        world.frames = [one for one in world.frames if one[2]["type"] != "run"]
        while world.frames:
            world.deliver(0)  # a ping tells the worker, and its beat the proxy, that one is missing
            world.frames = [one for one in world.frames if one[2]["type"] != "run"]
        world.advance(0.6)
    assert number not in world.fleet.tasks
    assert isinstance(world.ends[number][0], Fail)


def test_a_silent_worker_gets_no_work_and_is_given_up() -> None:
    world = World()
    silent, other = world.join(), world.join()
    world.settle(1)
    del world.workers[silent]  # it hangs: no beats, and the connection stays
    world.settle(4)
    assert world.fleet.status(world.now)["workers"][0]["state"] == "silent"
    numbers = [world.submit() for _ in range(4)]
    assert all(world.fleet.tasks[one].worker in (other, None) for one in numbers)
    world.settle(DEAD_SECONDS)
    assert [one.facts.incarnation for one in world.fleet.members.values()] == [other]
    assert all(world.received[one] == text(one) for one in numbers)


def test_a_worker_without_passes_is_given_up() -> None:
    world = World()
    stuck = world.join()
    world.submit()
    world.deliver(0)
    for _ in range(round(2 * fleet_module.HANG_SECONDS) + 2):
        world.advance(0.5)
        for index in reversed(range(len(world.frames))):
            world.deliver(index)
    assert stuck not in world.fleet.members


def test_another_text_of_a_restarted_answer_is_an_error_and_not_delivered() -> None:
    world = World()
    first = world.join()
    number = world.submit(is_resumable=False)
    world.deliver(0)
    world.workers[first].progress(world.now)
    world.act()
    while world.frames:
        world.deliver(0)
    received = list(world.received[number])
    world.crash(first)
    second = world.workers[world.join()]
    world.deliver(0)
    [key] = second.running
    second.ledger.produced(key, [received[0] + 1])
    world.act()
    world.deliver(len(world.frames) - 1)
    assert world.received[number] == received
    assert "same text" in world.ends[number][0].message


def test_the_prefix_decides_the_place() -> None:
    world = World()
    world.join()
    world.join()
    number = world.submit(num_blocks=20)
    home, prompt = world.fleet.tasks[number].worker, world.fleet.tasks[number].prompt
    other = world.submit(num_blocks=20)
    assert world.fleet.tasks[other].worker != home
    world.settle(10)
    digests = block_digests("", prompt[:-1])
    for again in (1000, 1001):
        world.received[again], world.ends[again] = [], []
        task = Task(again, prompt, 5, {"options": {}}, digests)
        world.fleet.submit(task, world.now)
        assert task.worker == home


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_drained_worker_gets_nothing_new_and_is_stopped(seconds: float) -> None:
    world = World()
    first = world.join()
    number = world.submit()
    second = world.join()
    assert world.fleet.drain("nobody", 1.0, world.now) == (
        f"there is no worker called 'nobody'; there are: {first}, {second}"
    )
    assert world.fleet.drain(first, seconds, world.now) is None
    other = world.submit()
    assert world.fleet.tasks[other].worker == second
    assert world.fleet.tasks[number].worker == (second if seconds == 0 else first)
    stops = []
    for _ in range(20):
        world.advance(0.5)
        for worker in world.workers.values():
            worker.progress(world.now)
        world.act()
        stops += [one for one in world.frames if one[2]["type"] == "stop"]
        while world.frames:
            world.deliver(0)
    assert [one[0] for one in stops] == [first]
    assert world.received[number] == text(number) and world.received[other] == text(other)


def test_a_second_worker_of_a_name_is_refused() -> None:
    world = World()
    name = world.join()
    facts = WorkerFacts(name, "other", "mixed", "g", ("x", 1), 3, 100)
    assert "there is a worker called" in (world.fleet.join(facts, 0.0) or "")
