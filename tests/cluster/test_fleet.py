"""The state machines of proxy and workers, over a network that loses, doubles and delays frames,
and with workers that crash: every task ends once, with its tokens, and nothing is left behind."""

from __future__ import annotations

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
    MAX_LOSSES,
    MAX_QUARANTINE_DEATHS,
    MIN_BLOCKS,
    SUSPECT_DEATHS,
    Fail,
    Finish,
    Fleet,
    SendTo,
    Task,
    TaskState,
    WorkerFacts,
)
from anydecode.cluster.leases import LEASE_SECONDS
from anydecode.cluster.ledger import Frame
from anydecode.memory.prefix import BLOCK, block_digests
from simulated_fleet import World, text


class FleetMachine(RuleBasedStateMachine):
    """Faults in any order, and then none."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.join("mixed")
        self.world.join("prefill")

    @rule(
        num_blocks=st.sampled_from([0, MIN_BLOCKS]),
        is_resumable=st.booleans(),
        is_poison=st.sampled_from([False, False, False, True]),
        images=st.sampled_from([(), (), (4,), (8, 2, 6)]),
    )
    def submit(
        self, num_blocks: int, is_resumable: bool, is_poison: bool, images: tuple[int, ...]
    ) -> None:
        self.world.submit(num_blocks, is_resumable, is_poison, images)

    @precondition(lambda self: self.world.fleet.tasks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        running = [one for one in sorted(self.world.fleet.tasks) if one in self.world.received]
        self.world.cancel(data.draw(st.sampled_from(running)))

    @rule(random=st.randoms(use_true_random=False), faults=st.sampled_from([0.0, 0.2, 0.5]))
    def exchange(self, random: Random, faults: float) -> None:
        """A pass of some workers; then the frames on their way arrive, or are lost, doubled or
        late."""
        world = self.world
        for worker in list(world.workers.values()):
            if random.random() < 0.8:
                world.progress(worker)
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

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """The cache of a worker is too small for its answers."""
        chosen = data.draw(st.sampled_from(sorted(self.world.workers)))
        self.world.workers[chosen].num_preemptions += 1

    @precondition(lambda self: len(self.world.workers) < 4)
    @rule(role=st.sampled_from(["mixed", "encode", "prefill", "decode"]))
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


_ON_TOKENS = Fleet._on_tokens


def _counts_all_deaths(self: Fleet, task: Task, now: float, reason: str) -> None:
    task.num_deaths += 1
    task.num_quarantine_deaths = task.num_deaths - 1
    self._restart(task, now, reason)


def _takes_all_tokens(self: Fleet, member: Any, task: Task, frame: Frame, now: float) -> None:
    _ON_TOKENS(self, member, task, {**frame, "start": task.num_received}, now)


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("_on_tokens", _takes_all_tokens),
        ("_lose", lambda *_: None),
        ("_die", _counts_all_deaths),
        ("_isolate", lambda *arguments: Fleet._place(*arguments) and None),
    ],
    ids=["tokens twice", "losses ignored", "chance is a cause", "quarantine in company"],
)
def test_wrong_twins_are_found(name: str, twin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, name, twin)
    thorough = settings(
        max_examples=2000,  # until the first that fails
        stateful_step_count=40,
        database=None,
        derandomize=True,
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


def test_a_prompt_whose_worker_is_lost_before_another_has_room_is_computed_again() -> None:
    world = World()
    lost, decode = world.join("prefill"), world.join("decode")
    number = world.submit(num_blocks=MIN_BLOCKS)
    for _ in range(world.workers[decode].facts.max_running):
        world.submit()

    def deliver() -> None:
        while world.frames:
            world.deliver(0)

    deliver()
    world.progress(world.workers[lost])
    world.act()
    deliver()
    assert world.fleet.tasks[number].state is TaskState.OFFERED
    world.crash(lost)
    world.join("prefill")
    world.settle(10)
    assert world.received[number] == text(number)
    assert world.fleet.counts["handovers"] == 1


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


def test_a_task_that_crashes_workers_is_given_up_and_those_beside_it_are_not() -> None:
    world = World()
    world.join()
    poison = world.submit(is_poison=True)
    others = [world.submit() for _ in range(2)]
    world.settle(10)
    [end] = world.ends[poison]
    assert isinstance(end, Fail) and "may be the cause" in end.message
    assert world.fleet.crashes[poison] == SUSPECT_DEATHS + MAX_QUARANTINE_DEATHS
    assert all(world.received[one] == text(one) for one in others)


def test_workers_that_are_lost_by_chance_fail_no_answer() -> None:
    world = World()
    number = world.submit()
    for _ in range(SUSPECT_DEATHS):
        world.crash(world.join())
    home = world.join()
    beside = world.submit()
    assert world.fleet.tasks[number].worker == home
    assert world.fleet.tasks[beside].worker is None
    world.crash(home)
    world.join()
    world.settle(10)
    assert world.received[number] == text(number) and world.received[beside] == text(beside)
    assert world.fleet.counts["quarantines"] == 1


def test_an_answer_whose_end_is_lost_has_its_text() -> None:
    """The worker crashes when all tokens of the answer have been received, and its end has not."""
    world = World()
    first = world.join()
    number = world.submit()
    world.deliver(0)
    while world.received[number] != text(number):
        world.workers[first].progress(world.now)
        world.act()
        while world.frames:
            world.deliver(0)
    world.crash(first)
    world.join()
    world.settle(5)
    assert world.received[number] == text(number)
    assert isinstance(world.ends[number][0], Finish)


def test_a_quarantined_task_gets_a_worker_although_new_tasks_come() -> None:
    world = World()
    world.join()
    world.join()
    number = world.submit()
    for _ in range(SUSPECT_DEATHS):
        for _ in range(2):
            world.submit()
        world.crash(world.fleet.tasks[number].worker or "")
        world.join()
    assert world.fleet.tasks[number].is_quarantined
    assert all(one.tasks for one in world.fleet.members.values())
    while not world.ends[number]:
        for _ in range(3):
            world.submit()
        world.settle(0.5)
        assert world.now < 60
    assert world.received[number] == text(number)


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


def test_the_process_of_a_worker_is_known_before_its_first_beat() -> None:
    world = World()
    world.join()  # a simulated worker, which has no process
    world.fleet.join(WorkerFacts("own", "own", "mixed", "g", ("x", 1), 3, 100, pid=4321), 0.0)
    assert [one["pid"] for one in world.fleet.status(0.0)["workers"]] == [None, 4321]


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


def test_an_answer_that_no_other_worker_can_run_stays_at_a_drained_worker() -> None:
    world = World()
    first = world.join()
    number = world.submit()
    assert world.fleet.drain(first, 0.0, world.now) is None
    world.settle(5)
    world.check()
    assert world.fleet.counts["restarts"] == 0
    assert world.received[number] == text(number)
    assert world.fleet.members[first].is_stopped


@pytest.mark.parametrize(
    ("is_resumable", "positions", "has_room"),
    [(True, 293, True), (True, 292, False), (False, 293, False)],
)
def test_an_answer_leaves_a_worker_that_preempts_for_one_with_room(
    is_resumable: bool, positions: int, has_room: bool
) -> None:
    """An answer of 4 tokens to a prompt of 33, beside another one: 293 positions have room for it
    and for the tokens that are expected."""
    world = World()
    home = world.join()
    first, second = (world.submit(num_blocks=2, is_resumable=is_resumable) for _ in range(2))
    task = world.fleet.tasks[second]
    task.generated = text(second)[:4]
    other = world.join(positions=positions)
    for num_preemptions in (0, 1):
        assert task.worker == home and world.fleet.counts["migrations"] == 0
        world.workers[home].num_preemptions = num_preemptions
        world.advance(0.5)
        while world.frames:
            world.deliver(0)
    assert (task.worker == other) == has_room
    assert world.fleet.tasks[first].worker == home
    assert world.fleet.counts["migrations"] == has_room


def test_a_prompt_is_computed_under_the_namespace_of_its_request() -> None:
    """Blocks of one tenant are never found by another, at prefill workers neither."""
    world = World()
    world.join("prefill")
    world.join("decode")
    prompt = list(range(BLOCK * MIN_BLOCKS + 1))
    message = {"options": {"namespace": "a tenant"}}
    task = Task(7, prompt, 5, message, block_digests("a tenant", prompt[:-1]))
    world.fleet.submit(task, world.now)
    sent = [one.frame for one in world.fleet.actions if isinstance(one, SendTo)]
    assert [(one["type"], one["options"]) for one in sent] == [("prefill", message["options"])]


def test_a_second_worker_of_a_name_is_refused() -> None:
    world = World()
    name = world.join()
    facts = WorkerFacts(name, "other", "mixed", "g", ("x", 1), 3, 100)
    assert "there is a worker called" in (world.fleet.join(facts, 0.0) or "")
