"""The loop: resume generators, plan, run, commit.

The engine knows lanes, scores and memory. It knows nothing of drafts, beams or masks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from anydecode.engine.model_runner import ModelRunner, Plan
from anydecode.engine.schedule import Schedule
from anydecode.errors import AnydecodeError, OutOfMemoryError
from anydecode.kernels.interface import Output
from anydecode.scoring.score import (
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

log = logging.getLogger("anydecode")


class Decoder(Protocol):
    """A decoding method: `decode` yields what it wants scored and emits tokens. It can start again
    from `sequence` at any time."""

    def decode(self, sequence: Sequence) -> Decoding: ...


@dataclass(eq=False)
class Job:
    """A sequence, its decoder, and what the generator waits for."""

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

    @property
    def scores(self) -> list[ScoreRequest]:
        """Everything this job has in a lane."""
        return [*self.group, *self.tickets]


class Clock(Protocol):
    """Tells in which order passes that run side by side come back (for tests)."""

    def seconds(self, runner: ModelRunner, plan: Plan) -> float: ...


class Engine:
    """Runs any number of sequences over any number of lanes.

    Lanes that have work at the same time run their passes side by side, on a thread each. With a
    `clock` they run one after the other but come back in the order of its times.
    """

    def __init__(self, runners: dict[str, ModelRunner], max_running: int = 256) -> None:
        self.runners = runners
        self.max_running = max_running
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.num_preemptions = 0
        self.num_tokens = 0  # said since the start
        self.on_pass: Callable[[Plan, float], None] | None = None  # the target's, step by step
        self.clock: Clock | None = None
        self.now = 0.0
        self._in_flight: dict[ModelRunner, tuple[Plan, Any]] = {}
        self._committing = False
        self._threads: ThreadPoolExecutor | None = None
        self._owners: dict[ScoreRequest, Job] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._in_flight)

    @property
    def is_between_passes(self) -> bool:
        """Whether no pass is under way and nobody reads the output of one, so that the models may
        run for something else."""
        return not (self._in_flight or self._committing)

    def submit(self, job: Job) -> Job:
        """Queue a job; it starts when a place is free."""
        self.waiting.append(job)
        return job

    def step(self) -> None:
        """Start what can start, run at least one pass, and resume whoever it answers."""
        began = perf_counter()
        self._admit()
        for runner in self.runners.values():
            if runner not in self._in_flight and runner.waiting:
                self._launch(runner)
        if self._in_flight:
            landed = self._collect()
            self._committing = True
            for runner, plan, output in landed:
                self._commit(runner, plan, output)
            self._committing = False
            if self.on_pass and len(landed) == 1 and runner.name == TARGET and not self._in_flight:
                self.on_pass(plan, perf_counter() - began)
        elif self.running and not any(runner.waiting for runner in self.runners.values()):
            stuck = [job for job in self.running if job.wait is not None]
            for job in stuck:
                self._end(job, RuntimeError("the decoder waits for nothing"))

    def cancel(self, job: Job, reason: str = "cancelled") -> None:
        """End a job now and free its memory."""
        if job.done:
            return
        if job in self.waiting:
            self.waiting.remove(job)
        job.sequence.finish_reason = job.sequence.finish_reason or reason
        self._end(job, None)

    def preempt(self, job: Job) -> None:
        """Take a job's memory; it starts again from its sequence later, with the same result."""
        self.num_preemptions += 1
        self._halt(job)
        if job in self.running:
            self.running.remove(job)
            self.waiting.appendleft(job)

    def fail(self, error: BaseException, *, waiting: bool = False) -> None:
        """End everything that runs with `error`, and with `waiting` what waits: a fault of the
        engine itself, which cannot be laid at one job's door."""
        wait([answer for _, answer in self._in_flight.values() if isinstance(answer, Future)])
        self._in_flight.clear()
        self._committing = False
        for job in [*self.running, *(self.waiting if waiting else ())]:
            try:
                self._end(job, error)
            except Exception:  # its memory may be what is at fault; the others end all the same
                log.exception("a job could not be ended in order")
        if waiting:
            self.waiting.clear()

    def close(self) -> None:
        """Cancel everything and stop the threads."""
        for job in [*self.waiting, *self.running]:
            self.cancel(job)
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def check_integrity(self) -> None:
        """Raise AssertionError where memory does not add up. Call between steps."""
        contexts = [c for job in self.running for c in job.sequence.contexts()]
        for runner in self.runners.values():
            own = [context for context in contexts if context.pool is runner.pool]
            for context in own:
                context.check_integrity()
            tables = [table for context in own for table in context.referenced_slots()]
            runner.pool.check_integrity(tables + runner.prefixes.referenced_slots())

    @property
    def _order(self) -> Schedule:
        """The schedule that decides who comes next and who gives way: the target's."""
        runner = self.runners.get(TARGET) or next(iter(self.runners.values()))
        return runner.schedule

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            index = self._order.next_job([job.sequence for job in self.waiting])
            job = self.waiting[index]
            if self.running and not self._fits(job):
                return
            del self.waiting[index]
            self._order.admitted(job.sequence)
            self.running.append(job)
            try:
                job.generators = [job.decoder.decode(job.sequence)]
            except Exception as error:
                log.exception("decoder %s failed", type(job.decoder).__name__)
                self._end(job, error)
                continue
            self._resume(job, None)

    def _fits(self, job: Job) -> bool:
        need = job.sequence.length + 1
        return all(
            need <= runner.pool.num_free + runner.prefixes.num_slots
            for runner in self.runners.values()
        )

    def _launch(self, runner: ModelRunner) -> None:
        plan = runner.plan(lambda score, planned: self._make_room(runner, score, planned))
        if plan is None:
            self._end_failed(runner)
            return
        if runner.name == TARGET:
            for score, _, _ in plan.scheduled:
                try:
                    score.sequence.sampler.prepare()
                except Exception:  # it is asked again for what it could not begin
                    log.exception("a policy failed to prepare")
        others = any(o.waiting for o in self.runners.values() if o is not runner) or self._in_flight
        if self.clock is not None:
            due = self.now + self.clock.seconds(runner, plan)
            self._in_flight[runner] = (plan, (due, self._run(runner, plan)))
        elif others:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(len(self.runners), "anydecode-lane")
            self._in_flight[runner] = (plan, self._threads.submit(self._run, runner, plan))
        else:
            self._in_flight[runner] = (plan, self._run(runner, plan))

    @staticmethod
    def _run(runner: ModelRunner, plan: Plan) -> Output | Exception:
        try:
            return runner.run(plan)
        except Exception as error:
            return error

    def _collect(self) -> list[tuple[ModelRunner, Plan, Output | Exception]]:
        """The passes that come back next."""
        flights = self._in_flight
        if self.clock is not None:
            self.now = min(due for _, (due, _) in flights.values())
            landed = [runner for runner, (_, (due, _)) in flights.items() if due == self.now]
            return [(runner, flights[runner][0], flights.pop(runner)[1][1]) for runner in landed]
        futures = [answer for _, answer in flights.values() if isinstance(answer, Future)]
        if len(futures) == len(flights):
            wait(futures, return_when=FIRST_COMPLETED)
        landed = [
            runner
            for runner, (_, answer) in flights.items()
            if not isinstance(answer, Future) or answer.done()
        ]
        result = []
        for runner in landed:
            plan, answer = flights.pop(runner)
            result.append((runner, plan, answer.result() if isinstance(answer, Future) else answer))
        return result

    def _commit(self, runner: ModelRunner, plan: Plan, output: Output | Exception) -> None:
        if isinstance(output, Exception):
            log.error("a pass of lane %s failed: %s", runner.name, output)
            self._abort(plan, output)
            self._end_failed(runner)
            return
        answered = runner.commit(plan, output)
        self._end_failed(runner)
        if runner.name == TARGET:
            for sequence in {score.sequence.root for score, _, _ in plan.scheduled}:
                sequence.num_passes += plan.num_passes
            for score, _, count in plan.scheduled:
                score.sequence.root.num_rows += count + plan.num_passes - 1
        for score, scores in answered:
            job = self._owners.pop(score, None)
            if job is None:  # cancelled by what an earlier answer of this pass led to
                continue
            self._share_prompt(runner, job.sequence, score)
            if score in job.tickets:
                ticket = job.tickets.pop(score)
                ticket.scores = scores.keep()
                if job.wait is not None and ticket in job.wait.tickets:
                    job.wait = None
                    self._resume(job, ticket)
            else:
                job.results[score] = scores
                if len(job.results) == len(job.group):
                    answer = [job.results[score] for score in job.group]
                    job.group, job.results = [], {}
                    self._resume(job, answer if job.is_group else answer[0])
                else:
                    scores.keep()

    def _abort(self, plan: Plan, error: Exception) -> None:
        """End the jobs whose memory a pass was to fill that failed."""
        unfilled = {span.context for _, span, _ in plan.scheduled}
        for job in list(self.running):
            if not unfilled.isdisjoint(job.sequence.contexts()):
                self._end(job, error)

    def _end_failed(self, runner: ModelRunner) -> None:
        """End the jobs whose scores could not be laid out; no pass of `runner` is under way."""
        for score, error in runner.failed:
            if (job := self._owners.get(score)) is not None:
                if not isinstance(error, AnydecodeError):
                    log.error("decoder %s failed", type(job.decoder).__name__, exc_info=error)
                self._end(job, error)
        runner.failed.clear()

    @staticmethod
    def _share_prompt(runner: ModelRunner, sequence: Sequence, score: ScoreRequest) -> None:
        """After the first score in a lane: let others share the prompt as soon as it is in memory,
        not only at the end, and count what came from the prefix cache itself."""
        shared = sequence.state.setdefault("shared", [])
        if runner.name not in shared:
            shared.append(runner.name)
            if runner.name == TARGET:
                cached = score.groups[0][0].context.num_cached
                sequence.num_cached_tokens = min(cached, len(sequence.prompt))
            share_prefix(runner, sequence)

    def _resume(self, job: Job, value: Any) -> None:
        """Drive the generator until it waits for a lane, or ends."""
        before = len(job.sequence.tokens)
        noted = len(job.sequence.trace or ())
        try:
            while not job.done:
                try:
                    request = job.generators[-1].send(value)
                except StopIteration as stop:
                    job.generators.pop()
                    if not job.generators:
                        self._end(job, None)
                        break
                    value = stop.value
                    continue
                goes_on, value = self._act(job, request)
                if not goes_on:
                    break
        except AnydecodeError as error:
            self._end(job, error)
        except Exception as error:
            log.exception("decoder %s failed", type(job.decoder).__name__)
            self._end(job, error)
        grown = len(job.sequence.tokens) - before
        self.num_tokens += max(0, grown)
        told = grown > 0 or len(job.sequence.trace or ()) > noted  # a canvas fills without tokens
        if job.on_progress is not None and told and not job.done:
            job.on_progress(job)

    def _act(self, job: Job, request: Any) -> tuple[bool, Any]:
        """Act on what a decoder yielded: whether it can go on at once, and what it is sent."""
        if isinstance(request, ScoreRequest):
            job.group, job.is_group = [request], False
            self._queue(job, request)
            return False, None
        if isinstance(request, list):
            if not request:
                return True, []
            job.group, job.is_group = request, True
            for score in request:
                self._queue(job, score)
            return False, None
        if isinstance(request, Submit):
            job.tickets[request.score] = ticket = Ticket(request.score)
            self._queue(job, request.score)
            return True, ticket
        if isinstance(request, Wait):
            for ticket in request.tickets:
                if ticket.scores is not None or ticket.cancelled:
                    return True, ticket
            job.wait = request
            return False, None
        if isinstance(request, Cancel):
            self._drop(job, request.ticket.score)
            request.ticket.cancelled = True
            return True, None
        if isinstance(request, MultiStep):
            job.generators.append(request.steps())
            return True, None
        raise TypeError(f"a decoder yielded {type(request).__name__}, which is no request")

    def _queue(self, job: Job, score: ScoreRequest) -> None:
        if score.runner not in self.runners:
            raise KeyError(score.runner)
        self._owners[score] = job
        self.runners[score.runner].add(score)

    def _drop(self, job: Job, score: ScoreRequest) -> None:
        self._owners.pop(score, None)
        job.tickets.pop(score, None)
        self.runners[score.runner].drop(score)

    def _halt(self, job: Job) -> None:
        """Stop a job's generator and take back its memory and its scores."""
        for score in job.scores:
            self._drop(job, score)
        job.group, job.results, job.wait = [], {}, None
        for generator in reversed(job.generators):
            try:
                generator.close()
            except Exception:  # the fault is the decoder's own, and the job ends anyway
                log.exception("decoder %s failed at its end", type(job.decoder).__name__)
        job.generators = []
        for runner in self.runners.values():
            share_prefix(runner, job.sequence)
        job.sequence.release()

    def _end(self, job: Job, error: BaseException | None) -> None:
        if job.done:
            return
        job.done = True
        job.error = error
        try:
            self._halt(job)
        finally:
            if job in self.running:
                self.running.remove(job)
            if job.sequence.finish_reason is None:
                job.sequence.finish_reason = "error" if error else "stop"
            if job.on_finish is not None:
                job.on_finish(job)

    def _make_room(self, runner: ModelRunner, score: ScoreRequest, planned: set[int]) -> bool:
        """Preempt the job that came last, or give up. A job that does not fit alone ends."""
        owner = self._owners[score]
        victims = [
            job
            for job in self.running
            if job is not owner
            and job.sequence.id not in planned
            and job.sequence.is_open(runner.name)
        ]
        if victims:
            self.preempt(victims[self._order.victim([job.sequence for job in victims])])
            return True
        if not planned and len(self.running) == 1:
            self._end(
                owner,
                OutOfMemoryError(
                    f"the cache holds {runner.pool.num_slots} positions, too few for this sequence "
                    f"of {owner.sequence.length}"
                ),
            )
        return False


def share_prefix(runner: ModelRunner, sequence: Sequence) -> None:
    """Offer what a sequence has computed in `runner` to later requests."""
    if runner.model.spec.causal and sequence.shares_prefix:
        for context in sequence.contexts(runner.name):
            runner.prefixes.insert(context, (sequence.adapter, sequence.namespace))
