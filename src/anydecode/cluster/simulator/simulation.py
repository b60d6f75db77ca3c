"""A fleet in virtual time, event by event.

Engines, schedules, caches and the state machines of proxy and workers are those that serve; passes
and transfers take the time that costs say. Equal inputs give equal results. Nothing is lost on the
way, and the proxy delays each request by the same time.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from anydecode.api.llm import LLM
from anydecode.api.request import Request
from anydecode.cluster.blocks import PromptBlocks, digests_of
from anydecode.cluster.control.roles import RoleControl
from anydecode.cluster.fleet import (
    BEAT_SECONDS,
    Deliver,
    Fail,
    Finish,
    Fleet,
    Part,
    SendTo,
    Task,
    WorkerFacts,
)
from anydecode.cluster.leases import MAX_LEASED_BYTES, Key
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
from anydecode.cluster.simulator.hollow import HollowModel, PassSeconds, TableSeconds, VirtualClock
from anydecode.errors import FleetError
from anydecode.memory.prefix import BLOCK
from anydecode.models.scripted import ByteTokenizer
from anydecode.scoring.cost import CostTable, ThreadCosts
from anydecode.scoring.sequence import TARGET


@dataclass(frozen=True)
class Arrival:
    """A request of a trace.

    Attributes:
        time: When it arrives, in seconds.
        prompt: Token ids below 256.
        num_tokens: Number of tokens of its answer.
        priority: As of requests.
        images: The number of embeddings of each image in the prompt.
    """

    time: float
    prompt: list[int]
    num_tokens: int
    priority: int = 0
    images: tuple[int, ...] = ()


@dataclass
class Served:
    """What became of a request.

    Attributes:
        arrival: When it arrived, in seconds.
        token_times: When each of its tokens came.
        failure: Why it has failed; None: it has not.
    """

    arrival: float
    token_times: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def first_token_seconds(self) -> float:
        """Time to its first token (TTFT)."""
        return self.token_times[0] - self.arrival

    @property
    def seconds_per_token(self) -> float:
        """Mean time between its tokens (TPOT); 0 for a single one."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


@dataclass(frozen=True)
class Link:
    """How long keys and values, or embeddings, travel between two workers, and requests and tokens
    between clients and workers.

    Attributes:
        position_bytes: Size of the keys and values of one position.
        bytes_per_second: The rate, packing and unpacking included.
        latency: Seconds for each transfer, whatever its size.
        embedding_bytes: Size of one embedding.
        request_seconds: Seconds from a client to the engine of a worker and back, by the proxy.
    """

    position_bytes: int = 0
    bytes_per_second: float = 5e8
    latency: float = 0.0
    embedding_bytes: int = 0
    request_seconds: float = 0.0

    def seconds(self, num_positions: int) -> float:
        """The duration of a transfer of keys and values."""
        return self.latency + num_positions * self.position_bytes / self.bytes_per_second

    def embedding_seconds(self, num_embeddings: int) -> float:
        """The duration of a transfer of embeddings."""
        return self.latency + num_embeddings * self.embedding_bytes / self.bytes_per_second


@dataclass(frozen=True)
class WorkerPlan:
    """A worker of a simulated fleet.

    Attributes:
        role: "mixed", "encode", "prefill" or "decode".
        costs: The costs of its passes, which its schedule is told.
        positions: Size of its cache.
        max_running: Maximum number of its tasks.
        num_layers: The layers of its model.
        engine: Further options of `LLM`, such as `schedule`.
        pass_seconds: The duration of each pass besides that of `costs`.
        answer_seconds: The same for each sequence of a pass.
        seconds: The durations of its passes; None: the sum of these.
        encode_seconds: The time to encode an image, per embedding. Passes go on meanwhile.
        thread_costs: The costs of its passes by number of threads, the largest of which is that of
            the worker. With two or more, schedules may run two passes at a time, such as `nexus`.
        pause_seconds: What a pass takes in addition, by the seconds without a pass before it.
        first_use_seconds: What it takes in addition for each position of the cache that it is the
            first to use.
    """

    role: str
    costs: CostTable
    positions: int = 1 << 16
    max_running: int = 64
    num_layers: int = 1
    engine: dict[str, Any] = field(default_factory=dict)
    pass_seconds: float = 0.0
    answer_seconds: float = 0.0
    seconds: PassSeconds | None = None
    encode_seconds: float = 0.0
    thread_costs: ThreadCosts | None = None
    pause_seconds: Mapping[float, float] = field(default_factory=dict)
    first_use_seconds: float = 0.0


@dataclass
class Pass:
    """One pass of a worker.

    Attributes:
        worker: The number of the worker.
        start: When it began.
        seconds: Its duration.
        rows: For each scheduled span the number of the request, the number of rows, and the first
            and the last layer.
    """

    worker: int
    start: float
    seconds: float
    rows: list[tuple[int, int, int, int]]


@dataclass
class Result:
    """What a simulation has found.

    Attributes:
        served: By number of the arrival.
        passes: The passes of all workers, in the order in which they began.
        counts: The counters of the fleet.
    """

    served: list[Served]
    passes: list[Pass]
    counts: dict[str, int]


def simulate(
    arrivals: Sequence[Arrival],
    workers: Sequence[WorkerPlan],
    link: Link = Link(),  # noqa: B008  frozen
    control: RoleControl | None = None,
) -> Result:
    """Serve a trace in virtual time.

    Args:
        arrivals: The requests, in order of arrival.
        workers: The workers of the fleet.
        link: The network between them.
        control: Changes their roles; None: they stay.

    Raises:
        FleetError: The simulation does not come to an end.
    """
    return _Simulation(arrivals, workers, link, control).run()


class _Worker:
    """A worker: the ledger and an engine over a hollow model."""

    def __init__(self, number: int, plan: WorkerPlan) -> None:
        self.number = number
        name = f"{number:04d}"
        self.facts = WorkerFacts(
            name, name, plan.role, "group", (name, 0), plan.max_running, plan.positions
        )
        self.ledger = Ledger(name, plan.max_running, plan.positions)
        threads = 1 if plan.thread_costs is None else max(plan.thread_costs.tables)
        self.llm = LLM(
            HollowModel(plan.costs, plan.num_layers, threads=threads),
            tokenizer=ByteTokenizer(),
            cache_positions=plan.positions,
            **plan.engine,
        )
        self.engine = self.llm.engine
        runner = self.engine.runners[TARGET]
        if plan.thread_costs is not None and threads > 2:  # as `LLM.add_runner` does
            runner.thread_cost = plan.thread_costs.seconds
        self.blocks = PromptBlocks(runner, MAX_LEASED_BYTES)
        self.kept: dict[Key, list[bytes]] = {}
        table = TableSeconds(plan.costs, plan.pass_seconds, plan.answer_seconds)
        self.clock = VirtualClock(
            plan.seconds or table, plan.thread_costs, plan.pause_seconds, plan.first_use_seconds
        )
        self.engine.clock = self.clock
        self._correct, self.engine.on_pass = self.engine.on_pass, None
        self.requests: dict[Key, Request] = {}
        self.num_sent: dict[Key, int] = {}
        self.is_busy = False
        self.images: set[int] = set()  # numbers of the images whose embeddings it has
        self._encode_seconds = plan.encode_seconds
        self._encoded_at = 0.0  # when all images that it got are encoded

    def encode(self, images: Sequence[Part], now: float) -> float:
        """Encode those of the images that it does not have, one after the other. Returns the time
        at which they are encoded."""
        new = [one for one in images if one.number not in self.images]
        if not new:
            return now
        seconds = self._encode_seconds * sum(one.num_rows for one in new)
        self._encoded_at = max(now, self._encoded_at) + seconds
        self.images.update(one.number for one in new)
        return self._encoded_at

    def start(self, key: Key, tokens: list[int], num_tokens: int, frame: Frame) -> None:
        options = frame["message"]["options"] if "message" in frame else frame["options"]
        request = self.llm.request(
            tokens,
            decoder="autoregressive",
            max_tokens=num_tokens,
            ignore_eos=True,
            seed=0,
            priority=options.get("priority", 0),
        )
        self.requests[key], self.num_sent[key] = request, 0
        self.engine.submit(request.jobs[0])

    def abort(self, key: Key) -> None:
        """End a task, whose answer goes on at another worker."""
        if key in self.requests:
            self.engine.cancel(self.requests[key].jobs[0])
            self._forget(key)

    def step(self, now: float) -> list[Pass]:
        """Begin passes, and compute what the engine will have computed at `engine.now`, when the
        first of those under way ends. Returns those that begin."""
        numbers = {id(one.jobs[0].sequence): key[0] for key, one in self.requests.items()}
        self.clock.pause = now - self.engine.now  # since the last pass has ended
        self.engine.now = now
        self.engine.step()
        launched, self.clock.launched = self.clock.launched, []
        for plan, seconds in launched:
            if self._correct is not None and plan.is_alone:
                self._correct(plan, seconds)
        return [
            Pass(
                self.number,
                now,
                seconds,
                [
                    (numbers[id(score.sequence.root)], num_rows, span.start, span.stop)
                    for score, span, num_rows in plan.scheduled
                ],
            )
            for plan, seconds in launched
        ]

    def report(self, now: float) -> None:
        """Tell the ledger what the pass has computed that ends now."""
        for key, request in list(self.requests.items()):
            job = request.jobs[0]
            if self.ledger.tasks[key].frame["type"] == "prefill":
                if job.done:
                    self._offer(key, now)
                continue
            tokens = list(job.sequence.tokens)
            self.ledger.produced(key, tokens[self.num_sent[key] :])
            self.num_sent[key] = len(tokens)
            if job.error is not None:
                self.ledger.failed(key, "FleetError", str(job.error), is_final=True)
                self._forget(key)
            elif job.done:
                self.ledger.ended(key, finish=job.sequence.finish_reason)
                self._forget(key)

    def _offer(self, key: Key, now: float) -> None:
        self._forget(key)
        frame = self.ledger.tasks[key].frame
        blocks = self.blocks.cached(frame["tokens"], None)[: frame["num_blocks"]]
        if self.ledger.prefilled(key, len(blocks), sum(map(len, blocks)), now):
            self.kept[key] = blocks

    def _forget(self, key: Key) -> None:
        del self.requests[key], self.num_sent[key]


class _Simulation:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        workers: Sequence[WorkerPlan],
        link: Link,
        control: RoleControl | None,
    ) -> None:
        self._arrivals = arrivals
        self._link = link
        self._fleet = Fleet(control)
        self._served = [Served(one.time) for one in arrivals]
        self._passes: list[Pass] = []
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._order = count()
        self._now = 0.0
        self._num_left = len(arrivals)
        self._is_beating = False
        self._workers: dict[str, _Worker] = {}
        numbers = count(len(arrivals))
        self._parts = [
            [
                Part(next(numbers), [], 0, {}, num_rows=rows, priority=one.priority)
                for rows in one.images
            ]
            for one in arrivals
        ]
        self._images = {part.number: part for parts in self._parts for part in parts}
        for number, plan in enumerate(workers):
            worker = _Worker(number, plan)
            self._workers[worker.facts.incarnation] = worker

    def run(self) -> Result:
        try:
            for worker in self._workers.values():
                self._fleet.join(worker.facts, 0.0)
            for number, arrival in enumerate(self._arrivals):
                self._at(arrival.time, self._arrive, number)
            while self._num_left and self._events:
                self._now, _, event, arguments = heapq.heappop(self._events)
                event(*arguments)
                self._act()
        finally:
            for worker in self._workers.values():
                worker.llm.close()
        if self._num_left:
            raise FleetError(f"{self._num_left} requests of the simulation do not end")
        return Result(self._served, self._passes, self._fleet.counts)

    def _at(self, time: float, event: Any, *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), event, arguments))

    # Events.

    def _arrive(self, number: int) -> None:
        arrival = self._arrivals[number]
        if not self._is_beating:
            self._beat()
        task = Task(
            number,
            arrival.prompt,
            arrival.num_tokens,
            {"options": {"priority": arrival.priority}},
            digests_of(arrival.prompt[:-1], None),
            priority=arrival.priority,
            parts=self._parts[number],
        )
        self._fleet.submit(task, self._now)

    def _beat(self) -> None:
        """The beats of all workers, which come as long as there are tasks."""
        for worker in self._workers.values():
            passes = worker.engine.runners[TARGET].num_passes + len(worker.images)
            preemptions = worker.engine.num_preemptions
            worker.ledger.beat(self._now, passes=passes, preemptions=preemptions)
        self._act()
        self._fleet.tick(self._now)
        self._at(self._now + BEAT_SECONDS, self._beat_again)
        self._is_beating = True

    def _beat_again(self) -> None:
        self._is_beating = False
        if self._fleet.tasks:
            self._beat()

    def _begin(self, worker: _Worker) -> None:
        self._passes += worker.step(self._now)
        if worker.engine.now > self._now:
            self._at(worker.engine.now, self._end, worker)
        else:  # there was no pass
            self._end(worker)

    def _end(self, worker: _Worker) -> None:
        worker.is_busy = False
        worker.report(self._now)

    def _pulled(self, worker: _Worker, key: Key, source: Frame) -> None:
        giver, of_giver = self._lease(source)
        blocks = giver.kept.get(of_giver, [])
        digests = digests_of(worker.ledger.tasks[key].frame["prompt"][:-1], None)
        worker.blocks.store(dict(zip(digests, blocks, strict=False)))
        giver.ledger.leases.acknowledge(of_giver, worker.facts.incarnation)
        worker.ledger.pulled(key)

    def _encoded(self, worker: _Worker, key: Key) -> None:
        worker.ledger.prefilled(key, 1, 0, self._now)

    def _media_pulled(self, worker: _Worker, key: Key, sources: list[Frame]) -> None:
        for source in sources:
            giver, of_giver = self._lease(source)
            giver.ledger.leases.acknowledge(of_giver, worker.facts.incarnation)
            worker.images.add(source["task"])
        worker.ledger.media_pulled(key)

    # Actions of the state machines.

    def _act(self) -> None:
        """Do what they ask for until they ask for nothing, then begin passes."""
        workers = self._workers.values()
        while self._fleet.actions or any(one.ledger.actions for one in workers):
            actions, self._fleet.actions = self._fleet.actions, []
            for action in actions:
                self._act_for_proxy(action)
            for worker in workers:
                of_worker, worker.ledger.actions = worker.ledger.actions, []
                for one in of_worker:
                    self._act_for_worker(worker, one)
        for worker in workers:
            for key, _ in worker.ledger.leases.ended:
                worker.kept.pop(key, None)
            worker.ledger.leases.ended.clear()
            if not worker.is_busy and worker.engine.has_work:
                worker.is_busy = True
                self._at(self._now, self._begin, worker)

    def _act_for_proxy(self, action: Any) -> None:
        if isinstance(action, SendTo):
            self._workers[action.incarnation].ledger.handle(action.frame)
        elif isinstance(action, Deliver):
            # The way to the worker counts here, too: it delays all requests by the same time.
            time = self._now + self._link.request_seconds
            self._served[action.task].token_times += [time] * len(action.tokens)
        elif isinstance(action, Finish | Fail):
            self._num_left -= 1
            if isinstance(action, Fail):
                self._served[action.task].failure = action.message

    def _act_for_worker(self, worker: _Worker, action: Any) -> None:
        if isinstance(action, Send):
            self._fleet.receive(worker.facts.incarnation, action.frame, self._now)
        elif isinstance(action, Start):
            frame = action.frame
            tokens = [*frame["prompt"], *frame["generated"]]
            num_tokens = frame["max_tokens"] - len(frame["generated"])
            self._begin_task(worker, action.key, tokens, num_tokens, frame)
        elif isinstance(action, Abort):
            worker.abort(action.key)
        elif isinstance(action, StartPrefill):
            self._begin_task(worker, action.key, action.frame["tokens"], 1, action.frame)
        elif isinstance(action, StartEncode):
            end = worker.encode([self._images[action.key[0]]], self._now)
            self._at(end, self._encoded, worker, action.key)
        elif isinstance(action, PullMedia):
            self._pull_media(worker, action)
        elif isinstance(action, Pull):
            self._pull(worker, action)

    def _lease(self, source: Frame) -> tuple[_Worker, Key]:
        """The worker that keeps what another one pulls, and the key of the lease."""
        return self._workers[source["address"][0]], (source["task"], source["attempt"])

    def _begin_pull(self, worker: _Worker, source: Frame) -> bool:
        """Reserve what a worker pulls. Returns whether the lease is still there."""
        giver, key = self._lease(source)
        leases, holder = giver.ledger.leases, worker.facts.incarnation
        return leases.reserve(key, holder, self._now) and leases.pull(key, holder, self._now)

    def _pull(self, worker: _Worker, action: Pull) -> None:
        if not self._begin_pull(worker, action.source):
            worker.ledger.pulled(action.key)
            return
        giver, key = self._lease(action.source)
        num_here = worker.blocks.num_cached(action.frame["prompt"][:-1], None)
        num_blocks = max(0, len(giver.kept[key]) - num_here)
        end = self._now + self._link.seconds(BLOCK * num_blocks)
        self._at(end, self._pulled, worker, action.key, action.source)

    def _begin_task(
        self, worker: _Worker, key: Key, tokens: list[int], num_tokens: int, frame: Frame
    ) -> None:
        """Start a task when its worker has all embeddings of its prompt."""
        images = self._parts[key[0]] if frame["encoded"] else []
        end = worker.encode(images, self._now)
        if end > self._now:
            self._at(end, self._start, worker, key, tokens, num_tokens, frame)
        else:
            worker.start(key, tokens, num_tokens, frame)

    @staticmethod
    def _start(worker: _Worker, key: Key, tokens: list[int], num_tokens: int, frame: Frame) -> None:
        if key in worker.ledger.tasks:
            worker.start(key, tokens, num_tokens, frame)

    def _pull_media(self, worker: _Worker, action: PullMedia) -> None:
        """Pull all embeddings at the same time, over a link for each."""
        sources = filter(None, action.frame["encoded"])
        held = [one for one in sources if self._begin_pull(worker, one)]
        seconds = [self._link.embedding_seconds(self._images[one["task"]].num_rows) for one in held]
        end = self._now + max(seconds, default=0.0)
        self._at(end, self._media_pulled, worker, action.key, held)
