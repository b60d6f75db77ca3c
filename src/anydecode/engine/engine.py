"""The engine loop: resume decoders, plan passes, run them, commit the results.

The engine handles model runners, score requests and memory. Decoding methods (drafts, beams,
masks) are the decoders' business.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from anydecode.constraints.background import set_other_work
from anydecode.engine.calls import MAX_WAIT, RunningCalls
from anydecode.engine.model_runner import ModelRunner
from anydecode.engine.plan import Plan
from anydecode.engine.schedule import Schedule
from anydecode.engine.schedules.pacing import is_prompt
from anydecode.errors import AnydecodeError, InvalidRequestError, OutOfMemoryError
from anydecode.kernels.interface import Output
from anydecode.sampling.sampler import constraint_of
from anydecode.scoring.score import (
    Call,
    Cancel,
    Decoding,
    MultiStep,
    ScoreRequest,
    Scores,
    Submit,
    Ticket,
    Wait,
)
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.state import StateKey

log = logging.getLogger("anydecode")
#: Maximum number of waiting prompts of which the prefix cache is told.
MAX_ANNOUNCED = 64

#: A decoder that computes masks for so many seconds is suspended, so that the other jobs go on. At
#: most so many are suspended at a time.
MAX_RESUME_SECONDS, MAX_SUSPENDED = 0.02, 4

#: The runners whose prefix cache has the prompt.
_SHARED: StateKey[list[str]] = StateKey("engine", "shared")


class Decoder(Protocol):
    """A decoding method."""

    def decode(self, sequence: Sequence) -> Decoding:
        """A generator that yields score requests and emits tokens until the sequence is finished.

        It must be able to start again from `sequence` at any time (after preemption).
        """
        ...


@dataclass(eq=False)
class Job:
    """A sequence with its decoder, and what the decoder waits for.

    Args:
        sequence: The sequence to generate.
        decoder: The decoding method.
        on_finish: Called once when the job ends, on the thread that steps the engine.
        on_progress: Called when there are new tokens or trace entries.
        generators: The decoder's generator, with nested ones of the engine on top.
        group: The score requests that the decoder waits for.
        results: Those of `group` that have run.
        is_group: Whether the decoder yielded a list.
        tickets: Submitted requests that have not run.
        wait: The `Wait` action that the decoder waits for.
        error: What ended the job, if it failed.
        done: Whether the job has ended.
        restarted: Number of tokens, and whether no other job ran, when the job last started again
            because it had filled the memory alone.
        is_long: Whether its decoder was suspended when it was last resumed.
        gives_way_to: The score request of another job that it was preempted for, until it is
            admitted again.
    """

    sequence: Sequence
    decoder: Decoder
    on_finish: Callable[[Job], None] | None = None
    on_progress: Callable[[Job], None] | None = None
    generators: list[Generator[Any, Any, Any]] = field(default_factory=list)
    group: list[ScoreRequest] = field(default_factory=list)
    results: dict[ScoreRequest, Scores] = field(default_factory=dict)
    is_group: bool = False
    tickets: dict[ScoreRequest, Ticket] = field(default_factory=dict)
    wait: Wait | None = None
    error: BaseException | None = None
    done: bool = False
    restarted: tuple[int, bool] = (-1, False)
    is_long: bool = False
    gives_way_to: ScoreRequest | None = None

    @property
    def requests(self) -> list[ScoreRequest]:
        """All score requests of this job that have not run."""
        return [*self.group, *self.tickets]


class _Ended(BaseException):
    """Raised in a decoder whose job has ended while it was suspended."""


class Clock(Protocol):
    """A virtual clock that determines the order in which concurrent passes finish (for tests)."""

    def seconds(self, runner: ModelRunner, plan: Plan) -> float:
        """The virtual duration of a pass."""
        ...


class Engine:
    """Continuous batching: runs any number of sequences on any number of model runners.

    Each `step` admits waiting jobs, runs at least one forward pass, and resumes the decoders whose
    requests have run. Model runners that have work at the same time run concurrently, one thread
    each. With a `clock`, passes run one after the other but finish in the order of its times.

    A decoder whose constraint takes long to compute masks is suspended within it, in its place on
    the stack: further steps for the other jobs run until the mask is known. Such jobs are resumed
    one per step while there are others, and none while one is suspended.

    Args:
        runners: Model runners by name; "target" and optionally "draft".
        max_running: Maximum number of jobs that run at the same time.

    Attributes:
        waiting: Jobs that have not been admitted, or were preempted.
        running: Jobs whose decoders run.
        num_preemptions: Number of preemptions so far.
        num_tokens: Number of tokens generated so far, over all jobs.
        num_stopped: Number of jobs that have ended before their limit.
        on_pass: Called with plan and duration (seconds) of each step that ran exactly one pass, on
            the target.
        arrivals: Returns the sequences that will be submitted before the next step; called during
            passes, on the threads that run them.
        between: Called between two steps while a decoder is suspended.
        clock: Virtual clock for tests, or None.
        now: Time of the virtual clock.

    Raises:
        InvalidRequestError: `max_running` is less than 1.
    """

    def __init__(self, runners: dict[str, ModelRunner], max_running: int = 256) -> None:
        if type(max_running) is not int or max_running < 1:
            raise InvalidRequestError(f"max_running is {max_running!r}; allowed is 1 or more")
        self.runners = runners
        self.max_running = max_running
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.num_preemptions = 0
        self.num_tokens = 0
        self.num_stopped = 0
        self.on_pass: Callable[[Plan, float], None] | None = None
        self.arrivals: Callable[[], Collection[Sequence]] = tuple
        self.between: Callable[[], object] = lambda: None
        self.clock: Clock | None = None
        self.now = 0.0
        self._in_flight: dict[ModelRunner, tuple[Plan, Any]] = {}
        self._committing = False
        self._threads: ThreadPoolExecutor | None = None
        self._owners: dict[ScoreRequest, Job] = {}
        #: Those that jobs were preempted for, while they have no slots.
        self._starved: set[ScoreRequest] = set()
        self._calls: RunningCalls[Job] = RunningCalls()
        self._announced: list[int] = []
        #: Passes that have ended; completed requests whose jobs have not got their scores; those of
        #: them whose group has not run to the end.
        self._collected: deque[tuple[ModelRunner, Plan, Output | Exception | None]] = deque()
        self._completed: deque[tuple[ModelRunner, ScoreRequest, Scores]] = deque()
        self._incomplete: dict[ScoreRequest, Job] = {}
        #: The job whose decoder runs, what it was resumed with, and since when; those suspended;
        #: the errors of those that have ended meanwhile; jobs to resume later, with their values.
        self._current: tuple[Job, Any] | None = None
        self._resumed_at = 0.0
        self._suspended: list[Job] = []
        self._ended: dict[Job, BaseException | None] = {}
        self._held: deque[tuple[Job, Any]] = deque()
        self._num_nested = 0
        self._fault: BaseException | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._in_flight)

    @property
    def is_between_passes(self) -> bool:
        """Whether no pass is running and no output is in use, so that the models may be run for
        another purpose (measuring)."""
        return not (self._in_flight or self._committing or self._suspended)

    def submit(self, job: Job) -> Job:
        """Add a job to the waiting queue, unless it was cancelled before, and return it."""
        if job.done:
            return job
        waiting = (other.sequence for other in self.waiting)
        self._target_schedule.submitted(job.sequence, waiting)
        self.waiting.append(job)
        return job

    def interrupt(self, is_wanted: bool = True) -> None:
        """Let multi-step passes end after their present step, so that what other threads have
        submitted need not wait for them; False: no longer. May be called on any thread."""
        for runner in self._streams:
            runner.interrupt[0] = is_wanted

    def step(self) -> None:
        """Admit waiting jobs, run at least one pass, and resume the decoders that it serves."""
        before = set_other_work(self._work_until)
        try:
            self._step()
        finally:
            set_other_work(before)

    def _step(self) -> bool:
        """One step. Returns whether a pass has ended."""
        start, num_nested = perf_counter(), self._num_nested
        self._finish()
        self._resume_held()
        self._admit()
        self._announce()
        if self._calls:
            has_rows = self._in_flight or any(one.waiting for one in self._streams)
            for job, call in self._calls.finished(wait=not has_rows):
                self._deliver(job, call)
        for runner in self._streams:
            if runner not in self._in_flight and runner.waiting:
                self._launch(runner)
        if self._in_flight:
            collected = self._collect()
            self._collected.extend(collected)
            self._finish()
            runner, plan, _ = collected[-1]
            if (
                self.on_pass
                and len(collected) == 1
                and runner.name == TARGET
                and not plan.left
                and plan.is_alone
                and not self._in_flight
                and self._num_nested == num_nested
            ):
                self.on_pass(plan, perf_counter() - start)
        elif self.running and not any(runner.waiting for runner in self._streams):
            deadlocked = [job for job in self.running if job.wait is not None]
            for job in deadlocked:
                self._end(job, RuntimeError("the decoder waits, but has no running request"))
            return False
        else:
            return False
        return True

    def cancel(self, job: Job, reason: str = "cancelled") -> None:
        """End a job now and free its memory."""
        if job.done:
            return
        if job in self.waiting:
            self.waiting.remove(job)
            self._announce()
        job.sequence.finish_reason = job.sequence.finish_reason or reason
        self._end(job, None)

    def preempt(self, job: Job) -> None:
        """Free a job's memory and put it back into the waiting queue. It starts again from its
        sequence, with the same result."""
        self.num_preemptions += 1
        self._release(job)
        if job in self.running:
            self.running.remove(job)
            self.waiting.appendleft(job)

    def fail(self, error: BaseException, *, waiting: bool = False) -> None:
        """End all running jobs (with `waiting`, also the waiting ones) with `error`: for faults of
        the engine that cannot be attributed to one job."""
        wait([output for _, output in self._in_flight.values() if isinstance(output, Future)])
        self._in_flight.clear()
        self._collected.clear()
        self._completed.clear()
        self._incomplete.clear()
        self._committing = False
        for job in [*self.running, *(self.waiting if waiting else ())]:
            try:
                self._end(job, error)
            except BaseException:  # its memory may be corrupt; the other jobs still have to end
                log.exception("failed to release a job")
        if waiting:
            self.waiting.clear()

    def close(self) -> None:
        """Cancel all jobs and stop the threads."""
        for job in [*self.waiting, *self.running]:
            self.cancel(job)
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        for runner in self._streams:
            runner.turns.users.discard(runner)

    def check_integrity(self) -> None:
        """Check the reference counts of all caches and the partial outputs of all model runners.
        Raises AssertionError. Call between steps."""
        all_caches = [c for job in self.running for c in job.sequence.kv_caches()]
        for runner in self.runners.values():
            runner.check_integrity()
            caches = [kv_cache for kv_cache in all_caches if kv_cache.pool is runner.pool]
            for kv_cache in caches:
                kv_cache.check_integrity()
            tables = [table for kv_cache in caches for table in kv_cache.referenced_slots()]
            runner.pool.check_integrity(tables + runner.prefixes.referenced_slots())

    @property
    def _streams(self) -> list[ModelRunner]:
        """All model runners, those of prompts included."""
        return [stream for runner in self.runners.values() for stream in runner.streams]

    @property
    def _target_schedule(self) -> Schedule:
        """The target's schedule, which selects the jobs to admit and to preempt."""
        runner = self.runners.get(TARGET) or next(iter(self.runners.values()))
        return runner.schedule

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            index = self._target_schedule.next_job([job.sequence for job in self.waiting])
            job = self.waiting[index]
            if self.running and (job.gives_way_to in self._starved or not self._has_room(job)):
                return
            del self.waiting[index]
            job.gives_way_to = None
            self._target_schedule.admitted(job.sequence)
            self.running.append(job)
            try:
                job.generators = [job.decoder.decode(job.sequence)]
            except Exception as error:
                log.exception("decoder %s failed", type(job.decoder).__name__)
                self._end(job, error)
                continue
            self._deliver(job, None)

    def _announce(self) -> None:
        """Tell the target's prefix cache which prompts wait, if evicted blocks are stored. The
        order is that of the schedule."""
        runner = self.runners.get(TARGET)
        if runner is None or runner.prefixes.spill is None:
            return
        ids = [job.sequence.id for job in self.waiting]
        if ids == self._announced:
            return
        self._announced = ids
        rest, queue = [job.sequence for job in self.waiting], list[Sequence]()
        while rest and len(queue) < MAX_ANNOUNCED:
            queue.append(rest.pop(self._target_schedule.next_job(rest)))
        runner.prefixes.expect([(one.all_tokens, (one.adapter, one.namespace)) for one in queue])

    def _has_room(self, job: Job) -> bool:
        num_positions = job.sequence.length + 1
        return all(
            num_positions <= runner.pool.num_free + runner.prefixes.num_slots
            for runner in self.runners.values()
        )

    def _launch(self, runner: ModelRunner) -> None:
        plan = runner.plan(lambda request, planned: self._make_room(runner, request, planned))
        if plan is None:
            self._end_failed(runner)
            return
        if self._starved:
            self._starved.difference_update(request for request, _, _ in plan.scheduled)
        if runner.name == TARGET:
            for request, _, _ in plan.scheduled:
                try:
                    request.sequence.sampler.prepare()
                except Exception:  # preparing is optional; the work is done when it is needed
                    log.exception("a sampler failed to prepare")
            plan.arrivals = self._arrivals
        has_concurrent_work = (
            any(o.waiting for o in self._streams if o is not runner) or self._in_flight
        )
        plan.is_alone = not has_concurrent_work
        runner.choose_threads(plan)
        if self.clock is not None:
            due = self.now + self.clock.seconds(runner, plan)
            self._in_flight[runner] = (plan, (due, self._run(runner, plan)))
        elif has_concurrent_work:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(len(self._streams), "anydecode-runner")
            self._in_flight[runner] = (plan, self._threads.submit(self._run, runner, plan))
        else:
            self._in_flight[runner] = (plan, self._run(runner, plan))

    def _arrivals(self) -> Collection[Sequence]:
        """The sequences that have been submitted since the last step, if one more can run."""
        return self.arrivals() if len(self.running) < self.max_running else ()

    @staticmethod
    def _run(runner: ModelRunner, plan: Plan) -> Output | Exception | None:
        try:
            return runner.run(plan)
        except Exception as error:
            return error

    def _collect(self) -> list[tuple[ModelRunner, Plan, Output | Exception | None]]:
        """Wait for the next passes to finish and return them with their outputs."""
        in_flight = self._in_flight
        if self.clock is not None:
            self.now = min(due for _, (due, _) in in_flight.values())
            finished = [runner for runner, (_, (due, _)) in in_flight.items() if due == self.now]
            return [
                (runner, in_flight[runner][0], in_flight.pop(runner)[1][1]) for runner in finished
            ]
        futures = [output for _, output in in_flight.values() if isinstance(output, Future)]
        if len(futures) == len(in_flight):
            wait(futures, return_when=FIRST_COMPLETED)
        finished = [
            runner
            for runner, (_, output) in in_flight.items()
            if not isinstance(output, Future) or output.done()
        ]
        result = []
        for runner in finished:
            plan, output = in_flight.pop(runner)
            result.append((runner, plan, output.result() if isinstance(output, Future) else output))
        return result

    def _commit(self, runner: ModelRunner, plan: Plan, output: Output | Exception | None) -> None:
        plan.unreserve_left()
        if output is None:
            return
        if isinstance(output, Exception):
            log.error("a forward pass of the %s model failed", runner.name, exc_info=output)
            self._abort(plan, output)
            self._end_failed(runner)
            return
        completed = runner.commit(plan, output)
        self._end_failed(runner)
        if runner.name == TARGET:
            for sequence in {request.sequence.root for request, _, _ in plan.scheduled}:
                sequence.num_passes += plan.num_passes
            further_rows = plan.further_rows or [0] * len(plan.scheduled)
            for (request, _, count), further in zip(plan.scheduled, further_rows, strict=True):
                request.sequence.root.num_rows += count + further
        self._completed.extend((runner, request, scores) for request, scores in completed)

    def _finish(self) -> None:
        """Commit the passes that have ended, and resume the decoders whose requests have run. What
        is left when a decoder is suspended is done in the next step."""
        was_committing, self._committing = self._committing, True
        while True:
            while self._completed:
                self._give(*self._completed.popleft())
            for request, job in self._incomplete.items():
                if request in job.results:  # the rest of the group runs in later passes
                    job.results[request].keep()
            self._incomplete.clear()
            if not self._collected:
                break
            self._commit(*self._collected.popleft())
        self._committing = was_committing

    def _give(self, runner: ModelRunner, request: ScoreRequest, scores: Scores) -> None:
        """Give a job the scores of a request, and resume it if it has all that it waits for."""
        job = self._owners.pop(request, None)
        if job is None:  # cancelled by a decoder that was resumed before
            return
        self._share_prompt(runner, job.sequence, request)
        if request in job.tickets:
            ticket = job.tickets.pop(request)
            ticket.scores = scores.keep()
            if job.wait is not None and ticket in job.wait.tickets:
                job.wait = None
                self._deliver(job, ticket)
            return
        job.results[request] = scores
        if len(job.results) == len(job.group):
            results = [job.results[request] for request in job.group]
            job.group, job.results = [], {}
            self._deliver(job, results if job.is_group else results[0])
        else:
            self._incomplete[request] = job

    def _abort(self, plan: Plan, error: Exception) -> None:
        """End the jobs whose caches a failed pass was to fill."""
        unfilled = {span.kv_cache for _, span, _ in plan.scheduled}
        for job in list(self.running):
            if not unfilled.isdisjoint(job.sequence.kv_caches()):
                self._end(job, error)

    def _end_failed(self, runner: ModelRunner) -> None:
        """End the jobs whose requests could not be planned. No pass of `runner` is running."""
        for request, error in runner.failed:
            if (job := self._owners.get(request)) is not None:
                if not isinstance(error, AnydecodeError):
                    log.error("decoder %s failed", type(job.decoder).__name__, exc_info=error)
                self._end(job, error)
        runner.failed.clear()

    @staticmethod
    def _share_prompt(runner: ModelRunner, sequence: Sequence, request: ScoreRequest) -> None:
        """After the first request of a sequence on `runner`: add the prompt to the prefix cache now
        instead of at the end, and record how many tokens came from the prefix cache."""
        shared = sequence.state.setdefault(_SHARED, [])
        if runner.name not in shared:
            shared.append(runner.name)
            if runner.name == TARGET:
                cached = request.groups[0][0].kv_cache.num_cached
                sequence.num_cached_tokens = min(cached, len(sequence.prompt))
            share_prefix(runner, sequence)

    def _deliver(self, job: Job, value: Any) -> None:
        """Resume a job with `value`, in a later step if others should not wait for it."""
        if self._comes_later(job):
            for scores in value if isinstance(value, list) else [value]:
                if isinstance(scores, Scores):
                    scores.keep()
            self._held.append((job, value))
        else:
            self._resume(job, value)

    def _comes_later(self, job: Job) -> bool:
        """Whether other jobs should not wait for `job`."""
        if len(self._suspended) >= MAX_SUSPENDED and constraint_of(job.sequence.sampler):
            return True
        return job.is_long and bool(self._suspended or self._has_quick_jobs)

    @property
    def _has_quick_jobs(self) -> bool:
        return not all(job.is_long for job in self.running)

    def _resume_held(self) -> None:
        """Resume a job that was to come later; all of them if there are no others."""
        while self._held and not self._suspended:
            self._resume(*self._held.popleft())
            if self._has_quick_jobs:
                return

    def _work_until(self, is_over: Callable[[float], bool]) -> None:
        """Suspend the decoder that runs, and run steps for the other jobs until `is_over(seconds)`,
        which waits at most so long. It is suspended only if it has run for `MAX_RESUME_SECONDS`,
        or that passes before `is_over`."""
        job, value = self._current or (None, None)
        if (
            job is None
            or job.tickets  # their passes are not to run within its decoder's code
            or self.clock is not None
            or len(self._suspended) >= MAX_SUSPENDED
        ):
            while not is_over(MAX_WAIT):
                pass
            return
        seconds_left = self._resumed_at + MAX_RESUME_SECONDS - perf_counter()
        if seconds_left > 0 and is_over(seconds_left):
            return
        scores = value if isinstance(value, list) else [value]
        restore = [one.saved() for one in scores if isinstance(one, Scores)]
        current, was_committing = self._current, self._committing
        self._suspended.append(job)
        try:
            is_done = False
            while not (is_done or job in self._ended):
                self._current = None
                self._num_nested += 1
                self.between()
                is_done = is_over(0 if self._step() else MAX_WAIT)
            while self._in_flight:  # the buffers of their outputs are restored
                self._collected.extend(self._collect())
                self._finish()
        except BaseException as fault:
            self._fault = fault
            raise _Ended from None
        finally:
            self._suspended.remove(job)
            self._current, self._committing = current, was_committing
            job.is_long = True
        for one in restore:
            one()
        if job in self._ended:
            raise _Ended
        self._resumed_at = perf_counter()

    def _resume(self, job: Job, value: Any) -> None:
        """Run the decoder until it waits for a score request, or ends."""
        job.is_long, before = False, self._current
        self._current, self._resumed_at = (job, value), perf_counter()
        num_tokens_before = len(job.sequence.tokens)
        num_traced_before = len(job.sequence.trace or ())
        try:
            while not job.done:
                try:
                    action = job.generators[-1].send(value)
                except StopIteration as stop:
                    job.generators.pop()
                    if not job.generators:
                        self._end(job, None)
                        break
                    value = stop.value
                    continue
                can_continue, value = self._handle(job, action)
                if not can_continue:
                    break
        except _Ended:
            if (fault := self._fault) is not None:
                self._fault = None
                raise fault from None
        except AnydecodeError as error:
            self._end(job, error)
        except Exception as error:
            log.exception("decoder %s failed", type(job.decoder).__name__)
            self._end(job, error)
        finally:
            self._current = before
        if job in self._ended:  # while its decoder was suspended
            self._end(job, self._ended[job])
        num_new_tokens = len(job.sequence.tokens) - num_tokens_before
        self.num_tokens += max(0, num_new_tokens)
        has_progress = (
            num_new_tokens > 0 or len(job.sequence.trace or ()) > num_traced_before
        )  # a canvas fills without tokens
        if job.on_progress is not None and has_progress and not job.done:
            job.on_progress(job)

    def _handle(self, job: Job, action: Any) -> tuple[bool, Any]:
        """Execute an action that a decoder yielded. Returns whether the decoder can be resumed at
        once, and the value to resume it with."""
        if isinstance(action, ScoreRequest):
            job.group, job.is_group = [action], False
            self._enqueue(job, action, may_be_prompt=not job.tickets)
            return False, None
        if isinstance(action, list):
            if not action:
                return True, []
            job.group, job.is_group = action, True
            for request in action:
                self._enqueue(job, request)
            return False, None
        if isinstance(action, Submit):
            job.tickets[action.request] = ticket = Ticket(action.request)
            self._enqueue(job, action.request)
            return True, ticket
        if isinstance(action, Wait):
            for ticket in action.tickets:
                if ticket.scores is not None or ticket.cancelled:
                    return True, ticket
            job.wait = action
            return False, None
        if isinstance(action, Cancel):
            self._remove(job, action.ticket.request)
            action.ticket.cancelled = True
            return True, None
        if isinstance(action, Call):
            self._calls.start(job, action)
            return False, None
        if isinstance(action, MultiStep):
            job.generators.append(action.steps())
            return True, None
        raise TypeError(f"a decoder yielded {type(action).__name__}; see scoring.score for actions")

    def _enqueue(self, job: Job, request: ScoreRequest, *, may_be_prompt: bool = False) -> None:
        """Queue a request; `may_be_prompt`: the job has no other one, so that its sequence is in
        one stream of passes only."""
        if request.runner not in self.runners:
            raise KeyError(request.runner)
        self._owners[request] = job
        runner = self.runners[request.runner]
        if runner.prompts is not None and may_be_prompt and is_prompt(request):
            runner = runner.prompts
        runner.add(request)

    def _remove(self, job: Job, request: ScoreRequest) -> None:
        self._owners.pop(request, None)
        self._starved.discard(request)
        job.tickets.pop(request, None)
        self.runners[request.runner].drop(request)

    def _release(self, job: Job) -> None:
        """Close a job's generators, remove its requests and free its memory."""
        self._wait_for_streams(job)
        for request in job.requests:
            self._remove(job, request)
        self._calls.drop(job)
        self._held = deque(one for one in self._held if one[0] is not job)
        job.group, job.results, job.wait = [], {}, None
        for generator in reversed(job.generators):
            try:
                generator.close()
            except Exception:  # the job ends anyway
                log.exception("decoder %s failed to close", type(job.decoder).__name__)
        job.generators = []
        for runner in self.runners.values():
            share_prefix(runner, job.sequence)
        job.sequence.release()

    def _wait_for_streams(self, job: Job) -> None:
        """Wait for passes over rows of `job` beside which other passes run: these could be given
        its slots."""
        for runner, (plan, output) in self._in_flight.items():
            if len(runner.main.streams) > 1 and isinstance(output, Future):
                if any(request.sequence.root is job.sequence for request, _, _ in plan.scheduled):
                    wait([output])

    def _end(self, job: Job, error: BaseException | None) -> None:
        if job.done:
            return
        if job in self._suspended:  # it ends when its decoder goes on
            self._ended.setdefault(job, error)
            return
        self._ended.pop(job, None)
        job.error = error  # first: another thread may look as soon as the job is done
        job.done = True
        try:
            self._release(job)
        finally:
            if job in self.running:
                self.running.remove(job)
            if job.sequence.finish_reason is None:
                job.sequence.finish_reason = "error" if error else "stop"
            self.num_stopped += job.sequence.finish_reason == "stop"
            if job.on_finish is not None:
                job.on_finish(job)

    def _make_room(self, runner: ModelRunner, request: ScoreRequest, planned: set[int]) -> bool:
        """Free slots for `request` by preempting the job that the schedule selects. Returns whether
        slots were freed.

        If the schedule selects the owner of `request` itself, it waits instead. So the job that the
        schedule would preempt last keeps its memory until it ends, and jobs cannot preempt each
        other for ever. The preempted one runs again once `request` has slots: else two jobs could
        take turns in holding what it needs. A job that fills the memory alone starts again, as its
        caches may share more then. If it fills the memory again without a new token, it starts
        again without drafts, and then it ends.
        """
        owner = self._owners[request]
        planned = planned | {
            one.sequence.root.id
            for other in runner.main.streams
            if other in self._in_flight
            for one, _, _ in self._in_flight[other][0].scheduled
        }
        candidates = [
            job
            for job in self.running
            if job is owner
            or job.sequence.id not in planned
            and job.sequence.kv_caches(runner.name)  # its own or those of its branches
        ]
        if len(candidates) > 1:
            index = self._target_schedule.victim([job.sequence for job in candidates])
            victim = candidates[index]
            if victim is owner or victim in self._suspended:
                return False
            self.preempt(victim)
            victim.gives_way_to = request
            self._starved.add(request)
            return True
        if planned or self._in_flight:
            return False
        state = len(owner.sequence.tokens), len(self.running) == 1
        if state > owner.restarted:
            owner.restarted = state
            self.preempt(owner)
        elif owner.sequence.drafts_fit:
            owner.sequence.drafts_fit = False
            self.preempt(owner)
        else:
            num_branches = len(owner.sequence.kv_caches(runner.name)) - 1
            branches = f" and its {num_branches} branches" if num_branches > 0 else ""
            self._end(
                owner,
                OutOfMemoryError(
                    f"the key-value cache holds {runner.pool.num_slots} positions, too few for this"
                    f" sequence of {owner.sequence.length} tokens{branches}; increase"
                    " cache_positions"
                ),
            )
        return False


def share_prefix(runner: ModelRunner, sequence: Sequence) -> None:
    """Add what a sequence has computed on `runner` to the prefix cache."""
    if runner.model.spec.causal and sequence.shares_prefix:
        states = sequence.draft_states.get(runner.name)
        stop = None if states is None else states.confirmed
        for kv_cache in sequence.kv_caches(runner.name):
            runner.prefixes.insert(kv_cache, (sequence.adapter, sequence.namespace), stop)
