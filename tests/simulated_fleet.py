"""A fleet's state machines without processes: workers with an engine that gives the right tokens,
and the frames on their way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

from anydecode.cluster.fleet import (
    MAX_QUARANTINE_DEATHS,
    SUSPECT_DEATHS,
    Deliver,
    Expel,
    Fail,
    Finish,
    Fleet,
    Part,
    SendTo,
    Task,
    WorkerFacts,
)
from anydecode.cluster.leases import Key
from anydecode.cluster.ledger import (
    Abort,
    Frame,
    Ledger,
    Pull,
    PullMedia,
    Send,
    Start,
    StartEncode,
    StartPrefill,
)
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
        self.prefilling: list[Key] = []  # and encoding
        self.num_passes = self.num_preemptions = 0

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


class CountingFleet(Fleet):
    """A fleet that counts on how many lost workers a task was, and had one for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.crashes: Counter[int] = Counter()
        self.lone_crashes: Counter[int] = Counter()

    def leave(self, incarnation: str, now: float) -> None:
        on_worker = list(self.members[incarnation].tasks) if incarnation in self.members else []
        self.crashes.update(on_worker)
        if len(on_worker) == 1:
            self.lone_crashes.update(on_worker)
        super().leave(incarnation, now)


class World:
    """A fleet, its workers, the frames on their way, and what clients have received."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fleet = CountingFleet()
        self.workers: dict[str, SimulatedWorker] = {}
        self.frames: list[tuple[str, bool, Frame]] = []  # incarnation, to the worker, frame
        self.received: dict[int, list[int]] = {}
        self.ends: dict[int, list[Any]] = {}
        self.cancelled: set[int] = set()
        self.poison: set[int] = set()  # tasks that crash the worker that computes them
        self.num_images = 0  # that came from the worker that has encoded them
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

    def progress(self, worker: SimulatedWorker) -> None:
        """A pass of a worker; one that crashes is started again."""
        if any(key[0] in self.poison for key in (*worker.running, *worker.prefilling)):
            self.crash(worker.facts.incarnation)
            self.join(worker.facts.role, worker.facts.group, worker.facts.positions)
        else:
            worker.progress(self.now)

    def submit(
        self,
        num_blocks: int = 0,
        is_resumable: bool = True,
        is_poison: bool = False,
        images: Sequence[int] = (),  # the number of rows of each
    ) -> int:
        number = next(self._numbers)
        if is_poison:
            self.poison.add(number)
        parts = [
            Part(next(self._numbers), [], 0, {}, digests=[b"%d" % rows], num_rows=rows)
            for rows in images
        ]
        prompt = [number] * (BLOCK * num_blocks + 1)
        task = Task(
            number,
            prompt,
            max_tokens=50,
            message={"options": {}},
            digests=block_digests("", prompt[:-1]),
            is_resumable=is_resumable,
            parts=parts,
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
            worker.ledger.beat(
                self.now, passes=worker.num_passes, preemptions=worker.num_preemptions
            )
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
            position = worker.running[action.key] = len(action.frame["generated"])
            assert position < len(text(action.key[0])), "a complete answer cannot be continued"
        elif isinstance(action, StartPrefill | StartEncode):
            worker.prefilling.append(action.key)
        elif isinstance(action, PullMedia):
            for source in filter(None, action.frame["encoded"]):
                self.num_images += self._give(source, worker)
            worker.ledger.media_pulled(action.key)
        elif isinstance(action, Pull):
            self._give(action.source, worker)
            worker.ledger.pulled(action.key)
        elif isinstance(action, Abort):
            worker.running.pop(action.key, None)
            if action.key in worker.prefilling:
                worker.prefilling.remove(action.key)

    def _give(self, source: Frame, worker: SimulatedWorker) -> bool:
        """Give what is under a lease to a worker. Returns whether it was there."""
        giver = self.workers.get(source["address"][0])
        if giver is None:
            return False
        key, holder = (source["task"], source["attempt"]), worker.facts.incarnation
        if not giver.ledger.leases.reserve(key, holder, self.now):
            return False
        assert giver.ledger.leases.pull(key, holder, self.now)
        giver.ledger.leases.acknowledge(key, holder)
        return True

    def settle(self, seconds: float) -> None:
        """Let time pass without faults."""
        stop = self.now + seconds
        while self.now < stop:
            self.advance(0.5)
            for worker in list(self.workers.values()):
                self.progress(worker)
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
            if self.ends[number] and "may be the cause" in getattr(
                self.ends[number][0], "message", ""
            ):
                assert self.fleet.lone_crashes[number] >= MAX_QUARANTINE_DEATHS
            assert self.fleet.crashes[number] <= SUSPECT_DEATHS + MAX_QUARANTINE_DEATHS
        for task in self.fleet.tasks.values():
            if isinstance(task, Part):
                assert task.owner is not None and task.owner.number in self.fleet.tasks
        on_workers = [task for one in self.fleet.members.values() for task in one.tasks.values()]
        assert len(on_workers) == len({task.number for task in on_workers})
        for member in self.fleet.members.values():
            assert len(member.tasks) == 1 or not any(
                task.is_quarantined for task in member.tasks.values()
            )
            for task in member.tasks.values():
                assert task.worker == member.facts.incarnation
