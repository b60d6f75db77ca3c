"""A large fleet in virtual time, with many passes per event.

While the answers of a worker stay the same, the duration of their next passes has a closed form. An
event is an arrival, a pass with rows of a prompt, the end of an answer or of a transfer: a few for
each request in place of one for each token. Workers schedule as `DecodesFirst`, and the proxy
places tasks as `Fleet` does without a control. There are no preemptions, priorities, images, leases
that end, or lost workers, and the first use of a position of the cache takes no time. Prompts share
what their hashed blocks share.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from anydecode.cluster.fleet import EXPECTED_TOKENS, MAX_PREFILLS, MIN_BLOCKS
from anydecode.cluster.routing import ROWS_PER_TASK
from anydecode.cluster.simulator.hollow import seconds_after_pause
from anydecode.cluster.simulator.simulation import Link, WorkerPlan
from anydecode.cluster.simulator.trace_files import HASHED_TOKENS, TracedRequest
from anydecode.engine.schedule import DecodesFirst
from anydecode.errors import UnsupportedCombinationError
from anydecode.memory.prefix import BLOCK

#: Prompts of more rows wait for the decodes and for shorter prompts, as in `DecodesFirst`.
_SHORT = DecodesFirst().short
_FAILED = (float("inf"), float("inf"))
#: The duration of a pass by the number of rows of each of its sequences, and of the positions to
#: which the last one attends. For passes of answers it is to be linear in the latter.
SpanSeconds = Callable[[np.ndarray, np.ndarray], float]
#: Higher than the cost of every place, in rows.
_NO_ROOM = 1 << 60


def leap(
    requests: Sequence[TracedRequest],
    worker: WorkerPlan,
    num_generating: int,
    num_prefill: int = 0,
    link: Link = Link(),  # noqa: B008  frozen
    shorten: float = 1.0,
    span_seconds: SpanSeconds | None = None,
) -> list[tuple[float, float]]:
    """Serve a trace in virtual time.

    Args:
        requests: The requests, in order of arrival, with the lengths that they have here.
        worker: What each worker is. Its role is not read.
        num_generating: The number of mixed or decode workers, 1 or more.
        num_prefill: The number of prefill workers.
        link: The network between them.
        shorten: By what the lengths of hashed blocks are divided.
        span_seconds: The durations of passes; None: those of the worker's costs.

    Returns:
        For each request the time to its first token and the mean time between its tokens, in
        seconds; infinite if it does not fit into the cache of a worker.

    Raises:
        UnsupportedCombinationError: The worker has another schedule.
    """
    if (schedule := worker.engine.get("schedule")) is not None:
        raise UnsupportedCombinationError(
            f"leap mode simulates the default schedule, not {schedule}: leave --schedule out, or"
            " simulate fewer workers"
        )
    return _Leap(requests, worker, num_generating, num_prefill, link, shorten, span_seconds).run()


@dataclass(eq=False, slots=True)
class _Task:
    """A request.

    Attributes:
        blocks: The hashed blocks of its prompt.
        positions: Positions that a worker must have free to start it.
        pending: Its rows in the load of its worker, until its first token.
        start: The first position of the prompt that its worker has to compute.
        stop: Where these positions end.
        is_prefill: Whether its worker only computes the prompt, for another worker.
        is_computed: Whether a prefill worker keeps its blocks.
        first: When its first token came.
    """

    number: int
    arrival: float
    length: int
    num_tokens: int
    blocks: tuple[int, ...]
    positions: int
    pending: int = 0
    start: int = 0
    stop: int = 0
    is_prefill: bool = False
    is_computed: bool = False
    first: float = 0.0

    @property
    def num_shared(self) -> int:
        """The tokens of its prompt in complete blocks."""
        return (self.length - 1) // BLOCK * BLOCK


@dataclass(eq=False)
class _Worker:
    """A worker: answers of which each pass generates one token, and prompts.

    Attributes:
        num_passes: The number of its passes so far that have had answers.
        ends: The answers, by the number of passes at which they end.
        num_positions: The number of tokens that the answers attend to, in sum.
        short: Prompts that run with the answers.
        long: Prompts that fill the row budget after them.
        start: When its passes began that are under way; None: none are.
        num_planned: The number of these passes.
        idle_since: When its last passes ended.
        version: The number of its latest event; earlier ones are void.
        blocks: The tokens of each hashed block in its cache, the most recently used one last.
        num_cached: The sum of these tokens.
    """

    index: int
    plan: WorkerPlan
    row_budget: int
    span_seconds: SpanSeconds | None
    num_passes: int = 0
    ends: list[tuple[int, int, _Task]] = field(default_factory=list)
    num_positions: int = 0
    short: deque[_Task] = field(default_factory=deque)
    long: deque[_Task] = field(default_factory=deque)
    start: float | None = None
    num_planned: int = 0
    idle_since: float = 0.0
    version: int = 0
    blocks: OrderedDict[int, float] = field(default_factory=OrderedDict)
    num_cached: float = 0.0

    def seconds(self, num: int) -> float:
        """The duration of the next `num` passes over the answers alone. It is exact where the cost
        is linear in the context."""
        rows, mean = len(self.ends), self.num_positions / len(self.ends)
        if self.span_seconds is not None:
            middle = np.full(rows, mean + (num - 1) / 2)
            return num * self.span_seconds(np.ones(rows, np.int64), middle)
        first, last = mean, mean + num
        knots = [one for one in self.plan.costs.seconds_by if first < one < last]
        edges = [first, *sorted(knots), last]
        total = num * self._besides(rows)
        for low, high in zip(edges, edges[1:], strict=False):
            total += (high - low) * self.plan.costs.seconds(rows, round((low + high - 1) / 2))
        return total

    def num_begun(self, past: float) -> int:
        """How many of the planned passes, which are over the answers alone, have begun after so
        many seconds. They take longer and longer, but little: the search begins at their mean."""
        num = min(max(1, int(past / self.seconds(1)) + 1), self.num_planned)
        while num > 1 and self.seconds(num - 1) >= past:
            num -= 1
        while num < self.num_planned and self.seconds(num) < past:
            num += 1
        return num

    def mixed_pass(self) -> tuple[float, list[_Task]]:
        """Run rows of prompts in a pass with the answers. Returns its duration, and the prompts
        that it completes."""
        left = self.row_budget - len(self.ends)
        num_sequences = len(self.ends)
        rows, positions, completed = len(self.ends), float(self.num_positions), []
        spans: list[tuple[int, int]] = []
        for queue in (self.short, self.long):
            while queue and left > 0:
                task = queue[0]
                num = min(task.stop - task.start, left)
                positions += num * (task.start + (num - 1) / 2)
                rows, left = rows + num, left - num
                task.start += num
                spans.append((num, task.start))
                num_sequences += 1
                if task.start < task.stop:
                    break
                completed.append(queue.popleft())
        if self.span_seconds is not None:
            counts, ends = np.array(spans).T
            answers = np.ones(len(self.ends), np.int64)
            mean = self.num_positions / max(1, len(answers))
            every = (np.append(counts, answers), np.append(ends, mean * answers))
            return self.span_seconds(*every), completed
        seconds = self.plan.costs.seconds(rows, int(positions / rows))
        return seconds + self._besides(num_sequences), completed

    def _besides(self, num_sequences: int) -> float:
        return self.plan.pass_seconds + self.plan.answer_seconds * num_sequences


class _Role:
    """The workers of one role, and their loads as arrays.

    Args:
        workers: The workers.
        max_tasks: Maximum number of tasks of each.
        max_positions: The size of its cache.
    """

    def __init__(self, workers: list[_Worker], max_tasks: int, max_positions: int) -> None:
        self.workers = workers
        self._max_tasks, self._max_positions = max_tasks, max_positions
        self._first = workers[0].index if workers else 0
        self._num_tasks = np.zeros(len(workers), np.int64)
        self._positions = np.zeros(len(workers), np.int64)
        self._rows = np.zeros(len(workers), np.int64)

    def best(self, positions: int, cached: dict[int, int]) -> _Worker | None:
        """The worker that has room and the fewest rows to compute before a task, or None.

        Args:
            positions: Those that the task needs.
            cached: By worker, the tokens of the task that are in its cache.
        """
        max_used = self._max_positions - positions
        if not cached:  # mostly the worker with the fewest rows has room
            fewest = int(self._rows.argmin())
            if self._num_tasks[fewest] < self._max_tasks and self._positions[fewest] <= max_used:
                return self.workers[fewest]
        has_room = self._num_tasks < self._max_tasks
        has_room &= self._positions <= max_used
        cost = np.where(has_room, self._rows, _NO_ROOM)
        if cached:
            indices = np.fromiter(cached, np.int64, len(cached)) - self._first
            tokens = np.fromiter(cached.values(), np.int64, len(cached))
            is_here = (indices >= 0) & (indices < len(cost))
            cost[indices[is_here]] -= tokens[is_here]
        best = int(cost.argmin())
        return self.workers[best] if has_room[best] else None

    def add(self, worker: _Worker, num_tasks: int, positions: int, rows: int) -> None:
        """Change the load of a worker."""
        index = worker.index - self._first
        self._num_tasks[index] += num_tasks
        self._positions[index] += positions
        self._rows[index] += rows


class _Leap:
    def __init__(
        self,
        requests: Sequence[TracedRequest],
        worker: WorkerPlan,
        num_generating: int,
        num_prefill: int,
        link: Link,
        shorten: float,
        span_seconds: SpanSeconds | None,
    ) -> None:
        self._link = link
        self._block_length = HASHED_TOKENS / shorten
        self._max_positions = worker.positions
        row_budget = worker.engine.get("row_budget", DecodesFirst().row_budget)
        workers = [
            _Worker(index, worker, row_budget, span_seconds)
            for index in range(num_generating + num_prefill)
        ]
        self._generating = _Role(workers[:num_generating], worker.max_running, worker.positions)
        self._prefill = _Role(workers[num_generating:], MAX_PREFILLS, worker.positions)
        self._holders: dict[int, set[int]] = {}
        self._tasks = [
            _Task(
                number,
                one.time,
                one.num_prompt,
                one.num_tokens,
                one.blocks,
                one.num_prompt + min(one.num_tokens, EXPECTED_TOKENS),
            )
            for number, one in enumerate(requests)
        ]
        self._latencies = [_FAILED] * len(requests)
        self._waiting: list[tuple[int, _Task]] = []
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._order = count()
        self._now = 0.0

    def run(self) -> list[tuple[float, float]]:
        arriving = (
            one for one in self._tasks if one.length + one.num_tokens <= self._max_positions
        )
        following = next(arriving, None)
        while following is not None or self._events:
            if following is not None and not (
                self._events and self._events[0][0] < following.arrival
            ):
                self._now = following.arrival
                heapq.heappush(self._waiting, (following.number, following))
                following = next(arriving, None)
            else:
                self._now, _, event, arguments = heapq.heappop(self._events)
                event(*arguments)
            self._dispatch()
        return self._latencies

    def _at(self, time: float, event: Any, *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), event, arguments))

    # Placement, as that of `Fleet`.

    def _dispatch(self) -> None:
        while self._waiting and self._place(self._waiting[0][1]):
            heapq.heappop(self._waiting)

    def _place(self, task: _Task) -> bool:
        """Start a task on the best worker. Returns whether one was free."""
        cached = self._cached(task)
        worker = self._generating.best(task.positions, cached)
        if worker is None:
            return False
        num_missing = task.num_shared - cached.get(worker.index, 0)
        task.is_prefill = (
            bool(self._prefill.workers)
            and not task.is_computed
            and num_missing >= MIN_BLOCKS * BLOCK
        )
        if task.is_prefill:
            worker = self._prefill.best(task.num_shared + 1, cached)
            if worker is None:
                return False
        num_here = cached.get(worker.index, 0)
        self._join(task, worker, num_here)
        task.start, task.stop = num_here, task.length
        if task.is_prefill:  # the last block is always computed
            task.stop = task.num_shared
            task.start = min(num_here, task.stop - BLOCK)
        if task.is_computed:
            task.start = task.num_shared
            seconds = self._link.seconds(num_missing)
            self._at(self._now + seconds, self._begin, worker, task)
        else:
            self._begin(worker, task)
        return True

    def _cached(self, task: _Task) -> dict[int, int]:
        """By worker, how many tokens of a prompt are in its cache, if any."""
        found: dict[int, int] = {}
        holders: set[int] | None = None  # of all blocks so far
        for number, block in enumerate(task.blocks, 1):
            has_block = self._holders.get(block, set())
            holders = has_block if holders is None else holders & has_block
            if not holders:
                break
            num_tokens = min(round(number * self._block_length), task.num_shared)
            found.update(dict.fromkeys(holders, num_tokens // BLOCK * BLOCK))
        return found

    def _join(self, task: _Task, worker: _Worker, num_here: int) -> None:
        """Give a task to a worker that has so many tokens of its prompt."""
        task.pending = task.length - num_here
        role, rows = self._role(task), task.pending + ROWS_PER_TASK
        role.add(worker, 1, task.positions, rows)
        left = float(task.num_shared)
        for block in task.blocks:
            num_tokens, left = min(self._block_length, left), max(0.0, left - self._block_length)
            worker.num_cached += num_tokens - worker.blocks.pop(block, 0.0)
            worker.blocks[block] = num_tokens
            self._holders.setdefault(block, set()).add(worker.index)
        while worker.num_cached > self._max_positions:
            block, num_tokens = worker.blocks.popitem(last=False)
            worker.num_cached -= num_tokens
            self._holders[block].remove(worker.index)
            if not self._holders[block]:
                del self._holders[block]

    def _leave(self, task: _Task, worker: _Worker) -> None:
        rows = task.pending + ROWS_PER_TASK
        self._role(task).add(worker, -1, -task.positions, -rows)
        task.pending = 0

    def _role(self, task: _Task) -> _Role:
        return self._prefill if task.is_prefill else self._generating

    # Passes.

    def _begin(self, worker: _Worker, task: _Task) -> None:
        """A task begins on its worker, with the next pass."""
        (worker.long if task.stop - task.start > _SHORT else worker.short).append(task)
        if worker.start is None:
            pause = self._now - worker.idle_since
            self._plan(worker, seconds_after_pause(worker.plan.pause_seconds, pause))
        elif worker.num_planned > 1:  # passes of answers alone, of which the present one ends
            num = worker.num_begun(self._now - worker.start)
            if num < worker.num_planned:
                worker.num_planned = num
                self._at_end(worker, worker.seconds(num), [])

    def _plan(self, worker: _Worker, additional: float = 0.0) -> None:
        """Begin the next passes of a worker, if there is something to compute. With rows of
        prompts, which come after a time without a pass, the pass takes so many seconds more."""
        if worker.short or worker.long:
            seconds, completed = worker.mixed_pass()
            seconds += additional
            worker.num_planned = 1
        elif worker.ends:
            worker.num_planned = worker.ends[0][0] - worker.num_passes
            seconds, completed = worker.seconds(worker.num_planned), []
        else:
            worker.start, worker.idle_since = None, self._now
            return
        worker.start = self._now
        self._at_end(worker, seconds, completed)

    def _at_end(self, worker: _Worker, seconds: float, completed: list[_Task]) -> None:
        assert worker.start is not None
        worker.version += 1
        self._at(worker.start + seconds, self._end, worker, worker.version, completed)

    def _end(self, worker: _Worker, version: int, completed: list[_Task]) -> None:
        """Planned passes of a worker have ended."""
        if version != worker.version:
            return
        worker.num_passes += worker.num_planned
        worker.num_positions += worker.num_planned * len(worker.ends)
        while worker.ends and worker.ends[0][0] <= worker.num_passes:
            _, _, task = heapq.heappop(worker.ends)
            worker.num_positions -= task.length + task.num_tokens - 1
            self._finish(task, worker)
        for task in completed:
            self._complete(task, worker)
        self._plan(worker)

    def _complete(self, task: _Task, worker: _Worker) -> None:
        """The last row of a prompt has been computed."""
        if task.is_prefill:
            self._leave(task, worker)
            task.is_computed = True
            heapq.heappush(self._waiting, (task.number, task))
            return
        self._generating.add(worker, 0, 0, -task.pending)
        task.pending, task.first = 0, self._now
        if task.num_tokens == 1:
            self._finish(task, worker)
            return
        end = worker.num_passes + task.num_tokens - 1
        heapq.heappush(worker.ends, (end, task.number, task))
        worker.num_positions += task.length

    def _finish(self, task: _Task, worker: _Worker) -> None:
        self._leave(task, worker)
        between = (self._now - task.first) / max(1, task.num_tokens - 1)
        first = task.first - task.arrival + self._link.request_seconds
        self._latencies[task.number] = first, between
