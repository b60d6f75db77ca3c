"""All tasks and workers, as the proxy sees them: a state machine without input or output.

Events go in (a task, a worker that joins or is lost, a frame, the time); frames for workers and
results of tasks come out, as `actions`. What a worker says about a task counts only if it names the
task's present attempt, and tokens only in order: so every task ends once, with every token once,
whatever is lost, doubled, late or out of order. A worker's beat lists what is really there; a task
that a beat does not list was lost and runs again, from the tokens that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from anydecode.cluster.control.roles import Group, RoleControl, TaskNeeds, WorkerLoad
from anydecode.cluster.ledger import Frame
from anydecode.cluster.routing import CachedBlocks, rows_before
from anydecode.memory.prefix import BLOCK

ROLES = ("mixed", "encode", "prefill", "decode")
#: Roles of workers that generate; workers with another role do only if there is none of these.
_GENERATING = ("mixed", "decode")

#: A worker is sent a frame at least once in so many seconds, and sends a beat as often.
BEAT_SECONDS = 0.5
#: A worker that was silent for so long gets no new work.
SUSPECT_SECONDS = 3.0
#: A worker that was silent for so long is given up.
DEAD_SECONDS = 15.0
#: A worker with tasks whose engine has made no pass for so long is given up.
HANG_SECONDS = 120.0
#: How long a task waits for a worker that could run it, if there is none.
PATIENCE_SECONDS = 60.0
#: A task that was on so many workers when they were lost may be the cause: it is then quarantined,
#: which means that it runs alone on a worker.
SUSPECT_DEATHS = 2
#: A quarantined task that was on so many workers when they were lost is not tried again.
MAX_QUARANTINE_DEATHS = 2
#: How often a task is started again because a frame was lost.
MAX_LOSSES = 16
#: Shorter prompts, in blocks that the decoding worker would have to compute, are not handed over.
MIN_BLOCKS = 4
#: Prompts that a prefill worker computes or has waiting, so that it never waits for the proxy.
MAX_PREFILLS = 2
#: Images that an encode worker encodes or has waiting.
MAX_ENCODES = 2
#: After so many losses of the encode worker that had an image, or of its frames, the image is
#: encoded by the worker that computes its prompt.
MAX_ENCODE_FAILURES = 2
#: Positions for new tokens that a worker must have free to get a task. It finds more by preemption.
EXPECTED_TOKENS = 256
#: A worker that has refused a task gets no other for so long, in seconds.
REFUSED_SECONDS = 0.2


#: The numbers of a worker's beats that `Fleet.status` reports.
LOADS = ("used", "passes", "rows", "hits", "restored")


class TaskState(Enum):
    """The states of a task; the last three are its ends."""

    QUEUED = auto()
    ENCODING = auto()
    PREFILLING = auto()
    OFFERED = auto()
    DECODING = auto()
    DONE = auto()
    FAILED = auto()
    CANCELLED = auto()


@dataclass(eq=False)
class Task:
    """One sample of a request.

    Args:
        number: A number unique in the fleet.
        prompt: Token ids.
        max_tokens: Maximum number of tokens of the answer.
        message: The options, for the worker.
        digests: The digests of the prompt's complete blocks; empty if they cannot be shared.
        is_resumable: Whether the answer can go on from its tokens, of which the last is generated
            again and compared; if not, it starts again, and all its tokens are compared.
        generated: The tokens of its answer so far.

    Attributes:
        state: Where it stands.
        attempt: Number of the present attempt.
        worker: The incarnation of the worker that it is on.
        lease: The prefill worker that keeps its blocks, and the attempt under which it does.
        group: The group of the workers that have generated its tokens.
        started: When it was started on its worker.
        submitted: When it was submitted.
        received_at: When its last tokens came from its worker.
        number_sent: The number of the frame that started it on its worker.
        rows: Rows of the prompt that its worker has to compute, until its first token.
        scenario: The number of its scenario, whose workers it runs on while there are any.
        num_deaths: How many workers were lost while it was on them.
        num_quarantine_deaths: How many of them it had for itself, in quarantine.
        parts: The images of its prompt, each a task that encode workers run.
    """

    number: int
    prompt: list[int]
    max_tokens: int
    message: dict[str, Any]
    digests: list[bytes] = field(default_factory=list)
    is_resumable: bool = True
    priority: int = 0
    generated: list[int] = field(default_factory=list)
    state: TaskState = TaskState.QUEUED
    attempt: int = 0
    worker: str | None = None
    lease: tuple[str, int] | None = None
    group: str | None = None
    number_sent: int = 0
    started: float = 0.0
    rows: int = 0
    scenario: int = 0
    submitted: float = 0.0
    received_at: float | None = None
    num_received: int = 0
    num_deaths: int = 0
    num_quarantine_deaths: int = 0
    num_losses: int = 0
    stranded_since: float | None = None
    parts: list[Part] = field(default_factory=list)

    @property
    def is_quarantined(self) -> bool:
        """Whether it may be the cause of lost workers, and runs alone on its next one."""
        return self.num_deaths >= SUSPECT_DEATHS

    @property
    def is_offline(self) -> bool:
        """Whether it may wait for tasks that are not."""
        return self.priority > 0

    @property
    def length(self) -> int:
        """Number of its tokens so far, the prompt included."""
        return len(self.prompt) + len(self.generated)

    @property
    def num_positions(self) -> int:
        """Positions that a worker must have free to start it."""
        return len(self.prompt) + min(self.max_tokens, EXPECTED_TOKENS)

    @property
    def max_positions(self) -> int:
        """Positions that it may need at most."""
        return len(self.prompt) + self.max_tokens


@dataclass(eq=False)
class Part(Task):
    """An image of a prompt, which an encode worker encodes and keeps under a lease. `message` is
    the image, `digests` has its key.

    Attributes:
        owner: The task with the prompt.
        num_rows: The number of its embeddings.
        is_given_up: Whether the worker that computes the prompt has to encode it.
    """

    owner: Task | None = None
    num_rows: int = 1
    is_given_up: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether an encode worker is to encode it: none has done so or does, and its prompt is on
        no worker and not computed."""
        if self.owner is None or self.owner.worker is not None or self.owner.lease is not None:
            return False
        return self.worker is None and self.lease is None and not self.is_given_up

    @property
    def is_quarantined(self) -> bool:
        return False  # it is given up first

    @property
    def num_positions(self) -> int:
        return 0

    @property
    def max_positions(self) -> int:
        return 0


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker says about itself when it joins.

    Attributes:
        name: The name for people.
        incarnation: The name of this process, which no other has.
        role: One of `ROLES`.
        group: Workers of one group give the same bits.
        address: Where other workers pull blocks: host and port.
        max_running: Maximum number of its tasks.
        positions: Size of its cache.
        pid: The id of its process; None: it has none of its own.
    """

    name: str
    incarnation: str
    role: str
    group: str
    address: tuple[str, int]
    max_running: int
    positions: int
    pid: int | None = None


@dataclass(eq=False)
class Member:
    """A worker of the fleet."""

    facts: WorkerFacts
    blocks: CachedBlocks
    last_beat: float
    number: int = 0  # of the last frame sent
    last_sent: float = 0.0
    tasks: dict[int, Task] = field(default_factory=dict)
    refused_until: float = 0.0
    drain_deadline: float | None = None
    is_stopped: bool = False
    num_passes: int = -1
    passed_at: float = 0.0
    last_facts: Frame = field(default_factory=dict)
    role: str = ""  # at first that of its facts
    scenario: int | None = None  # whose tasks it runs; None: all
    next_role: str | None = None  # once its prompts are computed; it gets no new task before
    prefilled_at: float = 0.0  # when its last prompt was computed for another worker
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.role = self.role or self.facts.role

    @property
    def is_quarantine(self) -> bool:
        return any(task.is_quarantined for task in self.tasks.values())

    @property
    def pending_rows(self) -> int:
        return sum(task.rows for task in self.tasks.values())

    @property
    def num_positions(self) -> int:
        return sum(task.num_positions for task in self.tasks.values())

    @property
    def num_free(self) -> int:
        """Positions that its tasks do not use, if they share nothing."""
        return self.facts.positions - sum(task.length for task in self.tasks.values())


@dataclass(frozen=True)
class SendTo:
    """Send a frame to a worker."""

    incarnation: str
    frame: Frame


@dataclass(frozen=True)
class Deliver:
    """The next tokens of a task."""

    task: int
    tokens: list[int]
    logprobs: list[Any] | None


@dataclass(frozen=True)
class Finish:
    """The end of a task that is done. `result`: what the worker says about it."""

    task: int
    result: Frame


@dataclass(frozen=True)
class Fail:
    """The end of a task that has failed. `kind`: the class of the worker's error, if it is final;
    else "fleet"."""

    task: int
    kind: str
    message: str


@dataclass(frozen=True)
class Expel:
    """Close the connection to a worker that was given up. `name`: the worker's, for people."""

    incarnation: str
    name: str
    reason: str


FleetAction = SendTo | Deliver | Finish | Fail | Expel


def _generating(able: list[Member]) -> list[Member]:
    """The workers that may get a task that generates; encode workers only if there is no other."""
    for roles in (_GENERATING, ("prefill",)):
        if found := [one for one in able if one.role in roles]:
            return found
    return able


class Fleet:
    """The tasks and workers of one proxy.

    Args:
        control: Changes the roles of workers as the load needs; None: they stay.

    Attributes:
        tasks: The tasks that have not ended, by number.
        members: The workers, by incarnation.
        actions: What the proxy has to do, in order; the caller empties the list.
        counts: Numbers of events so far, for metrics.
    """

    def __init__(self, control: RoleControl | None = None) -> None:
        self.control = control
        self.tasks: dict[int, Task] = {}
        self.members: dict[str, Member] = {}
        self.actions: list[FleetAction] = []
        self.counts = dict.fromkeys(
            (
                "tasks",
                "encodings",
                "handovers",
                "restarts",
                "lost_workers",
                "quarantines",
                "refusals",
                "role_changes",
                "migrations",
            ),
            0,
        )
        self._handlers: dict[str, Callable[[Member, Task, Frame, float], None]] = {
            "refused": self._on_refused,
            "offered": self._on_offered,
            "tokens": self._on_tokens,
            "ended": self._on_ended,
            "failed": self._on_failed,
        }

    @property
    def _placement(self) -> RoleControl | None:
        """The control, if it chooses the workers of tasks."""
        control = self.control
        return control if control is not None and control.has_placement else None

    @property
    def num_waiting(self) -> int:
        """Number of tasks that are on no worker. May be read on any thread."""
        tasks = list(self.tasks.values())
        return sum(task.worker is None for task in tasks if not isinstance(task, Part))

    @property
    def num_running(self) -> int:
        """Number of tasks that are on a worker. May be read on any thread."""
        tasks = list(self.tasks.values())
        return sum(task.worker is not None for task in tasks if not isinstance(task, Part))

    def submit(self, task: Task, now: float) -> None:
        """Queue a task."""
        self.counts["tasks"] += 1
        task.submitted = now
        if self.control is not None:
            task.scenario = self.control.scenario(len(task.prompt))
            self.control.record_arrival(task.scenario)
        self.tasks[task.number] = task
        for part in task.parts:
            part.owner, part.scenario = task, task.scenario
            self.tasks[part.number] = part
        self._dispatch(now)

    def cancel(self, number: int, now: float) -> None:
        """End a task, if it has not ended."""
        task = self.tasks.get(number)
        if task is not None:
            self._end(task, TaskState.CANCELLED, now)
            self._dispatch(now)

    def join(self, facts: WorkerFacts, now: float) -> str | None:
        """Add a worker. Returns why it is refused, or None."""
        for member in self.members.values():
            if member.facts.name == facts.name:
                return f"there is a worker called {facts.name!r} already; choose another --name"
        self.members[facts.incarnation] = Member(
            facts,
            CachedBlocks(facts.positions),
            now,
            passed_at=now,
            scenario=self._scenario_of(facts.role),
        )
        self._dispatch(now)
        return None

    def leave(self, incarnation: str, now: float) -> None:
        """A worker is lost: its tasks run again elsewhere."""
        member = self.members.pop(incarnation, None)
        if member is None:
            return
        self.counts["lost_workers"] += not member.is_stopped
        for task in list(member.tasks.values()):
            self._die(task, now, f"the worker {member.facts.name} was lost")
        for task in self.tasks.values():
            if task.lease is not None and task.lease[0] == incarnation:
                task.lease = None
                if task.state is TaskState.OFFERED:
                    task.state = TaskState.QUEUED
        self._dispatch(now)

    def drain(self, name: str, seconds: float, now: float) -> str | None:
        """Give a worker no new task, and stop it when it has none. After `seconds` its tasks go on
        elsewhere; those that no other worker can run stay until they end. Returns why that cannot
        be done, or None."""
        for member in self.members.values():
            if member.facts.name == name:
                member.drain_deadline = now + seconds
                self._stop_drained(now)
                return None
        known = ", ".join(sorted(one.facts.name for one in self.members.values())) or "none"
        return f"there is no worker called {name!r}; there are: {known}"

    def receive(self, incarnation: str, frame: Frame, now: float) -> None:
        """A frame of a worker."""
        member = self.members.get(incarnation)
        if member is None:
            return
        if frame["type"] == "beat":
            self._on_beat(member, frame, now)
        else:
            task = member.tasks.get(frame["task"])
            if task is not None and task.attempt == frame["attempt"]:
                self._handlers[frame["type"]](member, task, frame, now)
        if frame["type"] != "tokens":  # which make room for no task
            self._dispatch(now)

    def tick(self, now: float) -> None:
        """Time has passed; called at least every `BEAT_SECONDS`."""
        for member in list(self.members.values()):
            name, silence = member.facts.name, now - member.last_beat
            if silence >= DEAD_SECONDS:
                self._expel(member, f"the worker {name} is silent for {silence:.0f} s", now)
            elif member.tasks and now - member.passed_at >= HANG_SECONDS:
                self._expel(member, f"the worker {name} makes no progress", now)
            elif now - member.last_sent >= BEAT_SECONDS:
                self._send(member, {"type": "ping"}, now)
        self._stop_drained(now)
        self._change_roles(now)
        self._fail_stranded(now)
        self._dispatch(now)

    def status(self, now: float) -> Frame:
        """The workers, tasks and counters, as JSON."""
        return {
            "workers": [
                {
                    "name": member.facts.name,
                    "role": member.role,
                    "scenario": member.scenario,
                    "group": member.facts.group,
                    "pid": member.facts.pid,
                    "state": self._state(member, now),
                    "tasks": len(member.tasks),
                    "waiting_rows": member.pending_rows,
                    "positions": member.facts.positions,
                    "leases": len(member.last_facts.get("leases", ())),
                    **{name: member.last_facts.get(name, 0) for name in LOADS},
                }
                for member in self.members.values()
            ],
            "waiting": self.num_waiting,
            "running": self.num_running,
            "counts": dict(self.counts),
        }

    @staticmethod
    def _state(member: Member, now: float) -> str:
        if now - member.last_beat >= SUSPECT_SECONDS:
            return "silent"
        return "ready" if member.drain_deadline is None else "draining"

    # Frames of workers.

    def _on_beat(self, member: Member, frame: Frame, now: float) -> None:
        member.last_beat, member.last_facts = now, frame
        if frame["passes"] != member.num_passes or not member.tasks:
            member.num_passes, member.passed_at = frame["passes"], now
        listed = {tuple(key) for key in frame["tasks"]}
        leased = {tuple(key) for key in frame["leases"]}
        for task in list(member.tasks.values()):
            key = (task.number, task.attempt)
            if task.number_sent > frame["seen"] or key in listed:
                continue
            if task.state in (TaskState.PREFILLING, TaskState.ENCODING) and key in leased:
                self._on_offered(member, task, {"is_kept": True}, now)
            else:
                self._lose(task, now)
        for number, attempt in sorted(listed | leased):
            owner = self.tasks.get(number)
            is_running = (
                owner is not None
                and owner.attempt == attempt
                and owner.worker == member.facts.incarnation
            )
            is_leased = owner is not None and owner.lease == (member.facts.incarnation, attempt)
            if not (is_running or is_leased):
                self._send_cancel(member, number, attempt, now)
        if frame.get("preemptions", 0) > member.num_preemptions:
            member.num_preemptions = frame["preemptions"]
            self._relieve(member, now)

    def _relieve(self, member: Member, now: float) -> None:
        """Let the answer that has begun last at a worker whose cache is too small for its answers
        go on at the worker with the most room, if one has enough."""
        answers = [
            one
            for one in member.tasks.values()
            if one.state is TaskState.DECODING and one.is_resumable and not one.is_quarantined
        ]
        if len(answers) < 2:
            return
        task = max(answers, key=lambda one: (one.started, one.number))
        ready = [
            one
            for one in self._able(task)
            if one is not member
            and one.role in _GENERATING
            and self._may_get_tasks(one, now)
            and self._can_run(task, one, now)
            and one.num_free >= task.length + EXPECTED_TOKENS
        ]
        if ready:
            self._release(task, now)
            self._requeue(task)
            self.counts["migrations"] += 1
            self._run(task, max(ready, key=lambda one: (one.num_free, one.facts.name)), now)

    def _on_refused(self, member: Member, task: Task, frame: Frame, now: float) -> None:
        self.counts["refusals"] += 1
        member.refused_until = now + REFUSED_SECONDS
        self._requeue(task)

    def _on_offered(self, member: Member, task: Task, frame: Frame, now: float) -> None:
        if task.state not in (TaskState.PREFILLING, TaskState.ENCODING):
            return
        if self.control is not None and not isinstance(task, Part):
            self.control.record_prefill(task.scenario, now - task.started)
            self.control.record_prompt(task.rows, now - max(task.started, member.prefilled_at))
        member.prefilled_at = now
        lease = (member.facts.incarnation, task.attempt)
        self._requeue(task)
        task.state = TaskState.OFFERED
        task.lease = lease if frame["is_kept"] else None
        if isinstance(task, Part):
            self.counts["encodings"] += 1
            task.is_given_up = not frame["is_kept"]
        for part in task.parts:
            self._end_lease(part, now)

    def _on_tokens(self, member: Member, task: Task, frame: Frame, now: float) -> None:
        start, tokens, logprobs = frame["start"], frame["tokens"], frame["logprobs"]
        if start != task.num_received:
            if start > task.num_received:
                self._lose(task, now)
            return
        num_known = max(0, min(len(task.generated) - start, len(tokens)))
        if task.generated[start : start + num_known] != tokens[:num_known]:
            self._fail(task, "fleet", "the answer could not be continued with the same text", now)
            return
        control, answers = self._placement, member.tasks.values()
        if control is not None and task.received_at is not None and not member.pending_rows:
            seconds = (now - task.received_at) / len(tokens)
            control.record_token(len(answers), sum(one.length for one in answers), seconds)
        task.received_at = now
        task.num_received += len(tokens)
        task.rows = 0
        for one in (task, *task.parts):
            self._end_lease(one, now)
        if task.group is None:
            task.group = member.facts.group
        new = tokens[num_known:]
        if new:
            task.generated += new
            kept = None if logprobs is None else logprobs[num_known:]
            self.actions.append(Deliver(task.number, new, kept))

    def _on_ended(self, member: Member, task: Task, frame: Frame, now: float) -> None:
        if frame["count"] != task.num_received or task.num_received < len(task.generated):
            self._lose(task, now)
            return
        if self.control is not None and member.role == "decode":
            self.control.record_decode(task.scenario, now - task.started)
        self.actions.append(Finish(task.number, frame))
        self._end(task, TaskState.DONE, now)

    def _on_failed(self, member: Member, task: Task, frame: Frame, now: float) -> None:
        if frame["is_final"]:
            self._fail(task, frame["kind"], frame["message"], now)
        else:
            self._die(task, now, frame["message"])

    # Transitions of tasks.

    def _requeue(self, task: Task) -> None:
        """Take a task from its worker, which has it no more."""
        if task.worker is not None and (member := self.members.get(task.worker)) is not None:
            member.tasks.pop(task.number, None)
        task.worker, task.rows = None, 0
        task.state = TaskState.QUEUED if task.lease is None else TaskState.OFFERED
        task.attempt += 1

    def _lose(self, task: Task, now: float) -> None:
        """A frame of a task, or the task on its worker, was lost."""
        task.num_losses += 1
        self._restart(task, now, "its frames were lost")

    def _die(self, task: Task, now: float, reason: str) -> None:
        """The worker of a task was lost, by chance or because of the task. Only a task that had the
        worker for itself is held to be the cause."""
        task.num_quarantine_deaths += task.is_quarantined
        task.num_deaths += 1
        self.counts["quarantines"] += task.num_deaths == SUSPECT_DEATHS and task.is_quarantined
        self._restart(task, now, reason)

    def _restart(self, task: Task, now: float, reason: str) -> None:
        """Start a task again, with the tokens that it has."""
        for one in (task, *task.parts):
            self._release(one, now)
        self._requeue(task)
        if isinstance(task, Part):
            failures = task.num_deaths + task.num_losses
            task.is_given_up = task.is_given_up or failures >= MAX_ENCODE_FAILURES
            return
        self.counts["restarts"] += 1
        if task.num_quarantine_deaths >= MAX_QUARANTINE_DEATHS:
            message = (
                f"{task.num_deaths} workers were lost while they computed the answer, the last"
                f" {task.num_quarantine_deaths} of them nothing else: the request may be the"
                f" cause; at last {reason}"
            )
            self._fail(task, "fleet", message, now)
        elif task.num_losses > MAX_LOSSES:
            message = f"the answer was started {task.attempt + 1} times; at last {reason}"
            self._fail(task, "fleet", message, now)

    def _release(self, task: Task, now: float) -> None:
        """Cancel a task on its worker, and its lease."""
        if task.worker is not None and (member := self.members.get(task.worker)) is not None:
            self._send_cancel(member, task.number, task.attempt, now)
        self._end_lease(task, now)

    def _end_lease(self, task: Task, now: float) -> None:
        """Let the prefill worker of a task free its blocks."""
        if task.lease is not None:
            incarnation, attempt = task.lease
            task.lease = None
            if (member := self.members.get(incarnation)) is not None:
                self._send_cancel(member, task.number, attempt, now)

    def _fail(self, task: Task, kind: str, message: str, now: float) -> None:
        if isinstance(task, Part):  # the worker that computes the prompt finds the same error
            self._requeue(task)
            task.is_given_up = True
            return
        self.actions.append(Fail(task.number, kind, message))
        self._end(task, TaskState.FAILED, now)

    def _end(self, task: Task, state: TaskState, now: float) -> None:
        if state is TaskState.DONE and task.worker in self.members:
            self.members[task.worker].tasks.pop(task.number, None)
            task.worker = None
        for one in (task, *task.parts):
            self._release(one, now)
            self._requeue(one)
            one.state = state
            del self.tasks[one.number]

    # Workers.

    def _expel(self, member: Member, reason: str, now: float) -> None:
        self.actions.append(Expel(member.facts.incarnation, member.facts.name, reason))
        self.leave(member.facts.incarnation, now)

    def _stop_drained(self, now: float) -> None:
        for member in list(self.members.values()):
            deadline = member.drain_deadline
            if deadline is None or member.is_stopped:
                continue
            if now >= deadline:
                for task in list(member.tasks.values()):
                    if self._able(task):
                        self._restart(task, now, f"the worker {member.facts.name} was drained")
            is_leased = any(
                task.lease is not None and task.lease[0] == member.facts.incarnation
                for task in self.tasks.values()
            )
            if not member.tasks and not is_leased:
                member.is_stopped = True
                self._send(member, {"type": "stop"}, now)

    def _scenario_of(self, role: str) -> int | None:
        """The scenario of a worker that joins: the one with the fewest workers of its role."""
        if self.control is None or role not in ("prefill", "decode"):
            return None
        numbers = [len(self._group(one, role)) for one in range(self.control.num_scenarios)]
        return numbers.index(min(numbers))

    def _num_waiting(self, scenario: int, now: float) -> dict[str, int]:
        """By role, how many images or tasks of a scenario wait for a worker of this role."""
        numbers = dict.fromkeys(("encode", "prefill", "decode"), 0)
        for task in self.tasks.values():
            if isinstance(task, Part):
                numbers["encode"] += task.is_wanted and task.scenario == scenario
            elif task.worker is None and task.scenario == scenario and self._is_encoded(task, now):
                numbers["prefill" if self._needs_prefill(task, 0) else "decode"] += 1
        return numbers

    def _group(self, scenario: int | None, role: str) -> list[Member]:
        """The workers of a scenario that have a role and stay."""
        return [
            one
            for one in self.members.values()
            if (one.scenario, one.role) == (scenario, role) and one.drain_deadline is None
        ]

    def _change_roles(self, now: float) -> None:
        """Let workers change their role or scenario, if that raises the capacity. Their tasks go
        on."""
        if self.control is None:
            return
        groups = [
            Group(
                len(self._group(number, "prefill")),
                len(self._group(number, "decode")),
                0 if number else len(self._group(None, "encode")),
                self._num_waiting(number, now),
            )
            for number in range(self.control.num_scenarios)
        ]
        decode = [one for one in self.members.values() if one.role == "decode"]
        decode_places = min((one.facts.max_running for one in decode), default=1)
        for change in self.control.step(now, groups, MAX_PREFILLS, decode_places):
            (source, role), (target, next_role) = change.source, change.target
            members = self._group(None if role == "encode" else source, role)
            chosen = min(members, key=lambda one: (len(one.tasks), one.facts.name))
            chosen.scenario = None if next_role == "encode" else target
            chosen.role = next_role
            self.counts["role_changes"] += 1
        if not self.control.has_placement:
            return
        idle = self.control.idle_flip(now, self._loads(None, self.members.values(), now))
        if idle is not None:
            self.members[idle].next_role = "prefill"
        self._finish_flips()

    def _finish_flips(self) -> None:
        """Give the workers that are to change their role the new one, once they have no prompt to
        compute for others."""
        for member in self.members.values():
            is_prefilling = any(
                task.state is TaskState.PREFILLING for task in member.tasks.values()
            )
            if member.next_role is not None and not is_prefilling:
                member.role, member.next_role = member.next_role, None
                self.counts["role_changes"] += 1

    @staticmethod
    def _may_get_tasks(member: Member, now: float) -> bool:
        """Whether a worker may get a new task now or soon."""
        return (
            member.drain_deadline is None
            and member.next_role is None
            and now - member.last_beat < SUSPECT_SECONDS
            and not member.is_quarantine
        )

    def _fail_stranded(self, now: float) -> None:
        """Fail the tasks that have waited too long for a worker that could run them."""
        for task in list(self.tasks.values()):
            if task.worker is not None or isinstance(task, Part) or self._able(task):
                task.stranded_since = None
            elif task.stranded_since is None:
                task.stranded_since = now
            elif now - task.stranded_since >= PATIENCE_SECONDS:
                what = f"{task.max_positions} positions"
                group = "" if task.group is None else " of the group that has begun the answer"
                message = f"there is no worker{group} that has a cache of {what}"
                self._fail(task, "fleet", message, now)

    def _able(self, task: Task) -> list[Member]:
        """The workers that could run a task if they were free."""
        return [
            member
            for member in self.members.values()
            if member.drain_deadline is None
            and task.group in (None, member.facts.group)
            and task.max_positions <= member.facts.positions
            and (member.role == "encode" or not isinstance(task, Part))
        ]

    # Placement.

    def _dispatch(self, now: float) -> None:
        """Give tasks to workers, in order, until one of each scenario has to wait for a free
        worker. The first quarantined task that waits keeps the worker with the fewest tasks from
        new ones."""
        self._dispatch_parts(now)
        emptied: Member | None = None
        num_scenarios = 1 if self.control is None else self.control.num_scenarios
        full: set[int] = set()  # scenarios
        for task in self._waiting(now):
            if len(full) == num_scenarios:
                return
            if task.scenario in full or not self._is_encoded(task, now):
                continue
            able = [
                one
                for one in self._able(task)
                if self._may_get_tasks(one, now) and one is not emptied
            ]
            if not able:
                continue
            if task.is_quarantined:
                if emptied is None:
                    emptied = self._isolate(task, able, now)
            elif not self._place(task, able, now):
                full.add(task.scenario)

    def _waiting(self, now: float) -> Iterator[Task]:
        """The tasks on no worker, in the order in which they go to one."""
        tasks = self.tasks.values()
        waiting = [task for task in tasks if task.worker is None and not isinstance(task, Part)]
        preferred = None
        control = self._placement
        if control is not None and any(task.is_offline for task in waiting):
            preferred = control.preferred_length(self._loads(None, self.members.values(), now))

        def key(task: Task) -> tuple[int, int, int]:
            distance = 0
            if preferred is not None and task.is_offline:
                distance = abs(task.length - preferred)
            return task.priority, distance, task.number

        return iter(sorted(waiting, key=key))

    def _dispatch_parts(self, now: float) -> None:
        """Give images to encode workers: the images of the first prompt first, the largest of them
        before the others. Each goes to the worker that will have encoded it soonest."""
        wanted = [one for one in self.tasks.values() if isinstance(one, Part) and one.is_wanted]
        for part in sorted(wanted, key=lambda one: (one.priority, one.number)):
            free = [
                one
                for one in self._encoders(part, now)
                if len(one.tasks) < MAX_ENCODES and one.refused_until <= now
            ]
            if free:
                best = min(free, key=lambda one: self._cost(part, one))
                part.state = TaskState.ENCODING
                frame = {"type": "encode", "media": part.message, "positions": 0}
                self._start(part, best, frame, now)

    def _encoders(self, part: Part, now: float) -> list[Member]:
        """The workers that could encode an image if they were free."""
        return [one for one in self._able(part) if self._may_get_tasks(one, now)]

    def _is_encoded(self, task: Task, now: float) -> bool:
        """Whether a prompt does not have to wait for its images: each of them is encoded or can be
        encoded by no encode worker, or the prompt is computed."""
        return task.lease is not None or all(
            part.lease is not None or part.is_given_up or not self._encoders(part, now)
            for part in task.parts
        )

    def _place(self, task: Task, able: list[Member], now: float) -> bool:
        """Start a task on the best of the workers. Returns whether one was free."""
        own = [one for one in able if one.scenario in (None, task.scenario)]
        if any(one.role in _GENERATING for one in own):
            able = own
        if (control := self._placement) is not None:
            needs = TaskNeeds(task.length, now - task.submitted, task.is_offline)
            placement = control.place(now, needs, self._loads(task, able, now))
            if placement is not None:
                if placement.flip is not None:
                    self.members[placement.flip].next_role = "decode"
                    self._finish_flips()
                if placement.worker is None:
                    return False
                start = self._prefill if placement.is_prefill else self._run
                start(task, self.members[placement.worker], now)
                return True
        decoding = _generating(able)
        free = [one for one in decoding if self._can_run(task, one, now)]
        if not free:
            return False
        best = min(free, key=lambda one: self._cost(task, one))
        if self._needs_prefill(task, best.blocks.num_matched(task.digests)):
            prefilling = [
                one
                for one in able
                if one.role == "prefill" and one.facts.group == best.facts.group and one is not best
            ]
            if prefilling:
                ready = [one for one in prefilling if self._can_prefill(one, now)]
                if not ready:
                    return False
                self._prefill(task, min(ready, key=lambda one: self._cost(task, one)), now)
                return True
        self._run(task, best, now)
        return True

    @staticmethod
    def _needs_prefill(task: Task, num_matched: int) -> bool:
        """Whether a prefill worker is to compute the prompt for a worker that has so many of its
        blocks."""
        is_new = task.state is TaskState.QUEUED and not task.generated
        return is_new and len(task.digests) - num_matched >= MIN_BLOCKS

    @staticmethod
    def _can_run(task: Task, member: Member, now: float) -> bool:
        """Whether a worker has room for a task."""
        return (
            member.refused_until <= now
            and len(member.tasks) < member.facts.max_running
            and (
                not member.tasks
                or member.num_positions + task.num_positions <= member.facts.positions
            )
        )

    @staticmethod
    def _can_prefill(member: Member, now: float) -> bool:
        """Whether a prefill worker may get one more prompt."""
        prefills = (one for one in member.tasks.values() if one.state is TaskState.PREFILLING)
        return sum(1 for _ in prefills) < MAX_PREFILLS and member.refused_until <= now

    def _loads(self, task: Task | None, members: Iterable[Member], now: float) -> list[WorkerLoad]:
        """The workers that compute prompts or generate, as their control sees them."""
        return [
            self._load(task, one, now)
            for one in members
            if one.role != "encode" and self._may_get_tasks(one, now)
        ]

    def _load(self, task: Task | None, member: Member, now: float) -> WorkerLoad:
        """A worker as its control sees it, and whether it has room (for the task, if given)."""
        matched = 0 if task is None else member.blocks.num_matched(task.digests)
        tasks = list(member.tasks.values())
        answers = [one for one in tasks if one.state is TaskState.DECODING]
        has_place = len(tasks) < member.facts.max_running
        return WorkerLoad(
            name=member.facts.incarnation,
            role=member.role,
            group=member.facts.group,
            prompts=tuple(one.rows for one in tasks if one.rows),
            num_answers=len(answers),
            num_positions=sum(one.length for one in answers),
            usage=member.num_positions / member.facts.positions,
            num_matched=matched,
            num_uncached=0 if task is None else task.length - BLOCK * matched,
            needs_prefill=task is not None and self._needs_prefill(task, matched),
            can_prefill=self._can_prefill(member, now),
            can_decode=has_place if task is None else self._can_run(task, member, now),
        )

    def _isolate(self, task: Task, able: list[Member], now: float) -> Member | None:
        """Start a quarantined task on a worker without tasks, or return the worker that is to
        become one."""
        decoding = _generating(able)
        best = min(decoding, key=lambda one: (len(one.tasks), one.refused_until, one.facts.name))
        if best.tasks or best.refused_until > now:
            return best
        self._run(task, best, now)
        return None

    def _cost(self, task: Task, member: Member) -> tuple[int, str]:
        rows = rows_before(self._num_uncached(task, member), member.pending_rows, len(member.tasks))
        return rows, member.facts.name

    @staticmethod
    def _num_uncached(task: Task, member: Member) -> int:
        if isinstance(task, Part):
            return 0 if member.blocks.num_matched(task.digests) else task.num_rows
        cached = BLOCK * member.blocks.num_matched(task.digests)
        return task.length - cached

    def _prefill(self, task: Task, member: Member, now: float) -> None:
        task.state = TaskState.PREFILLING
        num_cached = BLOCK * len(task.digests)
        tokens = task.prompt if task.parts else task.prompt[:num_cached]
        options = task.message["options"]
        frame = {
            "type": "prefill",
            "tokens": tokens,
            "num_blocks": len(task.digests),
            "options": {
                name: options[name]
                for name in ("namespace", "prompt_embeds", "priority")
                if name in options
            },
            "encoded": self._encoded(task, member),
            "positions": len(tokens) + 1,
        }
        self._start(task, member, frame, now)

    def _encoded(self, task: Task, member: Member) -> list[Frame | None]:
        """Where a worker can pull the embeddings of each image of a prompt; None: nowhere."""
        return [self._source(part, member) for part in task.parts]

    def _source(self, task: Task, member: Member) -> Frame | None:
        """Where a worker can pull what another one of its group keeps of a task, or None."""
        if task.lease is None:
            return None
        incarnation, attempt = task.lease
        giver = self.members.get(incarnation)
        if giver is None or giver is member or giver.facts.group != member.facts.group:
            return None
        return {"address": list(giver.facts.address), "task": task.number, "attempt": attempt}

    def _run(self, task: Task, member: Member, now: float) -> None:
        task.state, source = TaskState.DECODING, self._source(task, member)
        self.counts["handovers"] += source is not None
        # The last token is generated again: if only the end of the answer was lost, nothing else is
        # left to generate, and a worker cannot continue a complete answer.
        generated = task.generated[:-1] if task.is_resumable else []
        task.num_received = len(generated)
        frame = {
            "type": "run",
            "prompt": task.prompt,
            "generated": generated,
            "message": task.message,
            "max_tokens": task.max_tokens,
            "positions": task.num_positions,
            "source": source,
            "encoded": self._encoded(task, member) if source is None else [],
        }
        self._start(task, member, frame, now)

    def _start(self, task: Task, member: Member, frame: Frame, now: float) -> None:
        task.worker, task.started, task.received_at = member.facts.incarnation, now, None
        task.rows = max(0, self._num_uncached(task, member))
        member.blocks.add(task.digests)
        member.tasks[task.number] = task
        if len(member.tasks) == 1:
            member.passed_at = now
        frame = {**frame, "task": task.number, "attempt": task.attempt}
        task.number_sent = self._send(member, frame, now)

    def _send_cancel(self, member: Member, number: int, attempt: int, now: float) -> None:
        self._send(member, {"type": "cancel", "task": number, "attempt": attempt}, now)

    def _send(self, member: Member, frame: Frame, now: float) -> int:
        member.number += 1
        member.last_sent = now
        numbered = {**frame, "number": member.number}
        self.actions.append(SendTo(member.facts.incarnation, numbered))
        return member.number
