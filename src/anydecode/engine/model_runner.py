"""Runs one model: collects score requests, plans a forward pass, runs it and returns the
results."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from anydecode.engine.layer_ranges import has_layer_ranges, predicted_range_size, run_in_ranges
from anydecode.engine.optional_rows import without_useless_rows
from anydecode.engine.plan import Plan
from anydecode.engine.schedule import Schedule, ScheduledSpan, ThreadCost
from anydecode.engine.schedules.pacing import mean_length
from anydecode.engine.shared_models import turns_of
from anydecode.errors import InvalidRequestError
from anydecode.kernels.host import to_host
from anydecode.kernels.interface import (
    MAX_SEQUENCES,
    MAX_SHARED_DRAFTS,
    Array,
    BurstDrafts,
    Output,
    OutputSpec,
    Rows,
    SampleSpec,
)
from anydecode.memory.layer_load import LayerLoad
from anydecode.memory.pool import KVPool, PoolFull
from anydecode.memory.prefix import PrefixCache
from anydecode.models.per_layer import late_start_error
from anydecode.scoring.cost import CostModel
from anydecode.scoring.goodput import token_weights
from anydecode.scoring.score import ScoreRequest, Scores
from anydecode.scoring.span import MultiStepSpan, Span

#: Maximum duration of one multi-step pass, in seconds (or one step, if that takes longer): its
#: tokens are streamed together. A request that is submitted or cancelled meanwhile ends it earlier
#: (`Engine.interrupt`).
MAX_MULTI_STEP_SECONDS = 0.05
#: Weight of a pass in the average of the durations of steps.
STEP_RATE = 0.25


@dataclass(eq=False)
class PartialOutput:
    """Output rows of a span that earlier passes have computed, as copies."""

    logits: list[np.ndarray] = field(default_factory=list)
    hidden: dict[int, list[np.ndarray]] = field(default_factory=dict)


class SpanOutput(NamedTuple):
    """Output of the pass that has finished a span.

    `logits` are float32 `[rows, vocab_size]`, `hidden[layer]` the captured hidden states `[rows,
    hidden_size]`, `sampled` the token that the backend sampled for each row (-1 for none).
    """

    logits: Array
    hidden: dict[int, Array]
    sampled: list[int]


class ModelRunner:
    """A model with its key-value pool and its waiting score requests; runs one pass at a time.

    Args:
        name: "target" or "draft".
        pool: The slots of the key-value cache, and the model.
        schedule: Selects the spans of each pass.
        main: The runner whose prompts this one runs, in passes at the same time; or None.

    Attributes:
        prompts: The runner of this one's prompts, whose `main` is this one; or None.
        prefixes: The prefix cache over `pool`.
        waiting: Score requests that have not run to the end, in order of arrival.
        failed: Requests that could not be planned, with the reason.
        num_passes: Number of passes so far.
        num_rows: Number of rows computed so far.
        seconds: Total duration of all passes.
        interrupt: Whether multi-step passes are to end after the present step, int32 `[1]`; other
            threads may set it.
        cost_model: The costs by which optional rows and the drafts of multi-step passes are
            chosen; None: all optional rows run.
        thread_cost: The cost of a pass by its number of threads, or None.
        turns: The turns of those that run the model object.
    """

    prefixes: PrefixCache

    def __init__(
        self, name: str, pool: KVPool, schedule: Schedule, main: ModelRunner | None = None
    ) -> None:
        self.name = name
        self.pool = pool
        self.model = pool.model
        self.main = main or self
        self.prompts: ModelRunner | None = None
        self.prefixes = PrefixCache(pool) if main is None else main.prefixes
        self.schedule = schedule
        self.turns = turns_of(pool.model, self)
        self.waiting: list[ScoreRequest] = []
        self.failed: list[tuple[ScoreRequest, Exception]] = []
        self.num_passes = 0
        self.num_rows = 0
        self.seconds = 0.0
        self.interrupt = np.zeros(1, np.int32)
        self.cost_model: CostModel | None = None
        self.thread_cost: ThreadCost | None = None
        # Duration of a pass over one row of so many sequences, or step of a burst of them: the
        # average over recent ones.
        self._step_seconds: dict[int, float] = {}
        self._partial_outputs: dict[Span, PartialOutput] = {}

    def divide(self) -> None:
        """Run prompts in passes of their own from now on, if the model can run two at once."""
        make = getattr(self.model, "beside", lambda team: None)
        model, prompts_model = make(0), make(1)
        if model is not None and prompts_model is not None:
            # The pool's own model remains for the decoders, which use it while passes run.
            self.model.executor.threads_in_use = 1  # type: ignore[attr-defined]
            self.prompts = ModelRunner(self.name, self.pool, copy(self.schedule), self)
            for runner, own in ((self, model), (self.prompts, prompts_model)):
                runner.model, runner.turns = own, turns_of(own, runner)

    @property
    def streams(self) -> list[ModelRunner]:
        """This runner, and that of its prompts."""
        return [self] if self.prompts is None else [self, self.prompts]

    def add(self, request: ScoreRequest) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def drop(self, request: ScoreRequest) -> None:
        """Remove a request, whether it is waiting or not."""
        for stream in self.streams:
            if request in stream.waiting:
                stream.waiting.remove(request)
            for spans in request.groups:
                for span in spans:
                    stream._partial_outputs.pop(span, None)

    def check_integrity(self) -> None:
        """Check that partial outputs are held for waiting requests only. Raises AssertionError."""
        for stream in self.streams:
            groups = [spans for request in stream.waiting for spans in request.groups]
            waiting = {span for spans in groups for span in spans}
            assert stream._partial_outputs.keys() <= waiting, "a dropped request has outputs"

    def plan(self, make_room: Callable[[ScoreRequest, set[int]], bool]) -> Plan | None:
        """Reserve cache slots and build the rows of the next pass.

        A request that raises an error goes to `failed`, and the others run without it.

        Args:
            make_room: Called as `make_room(request, planned)` when the pool is full. It must free
                slots without touching the sequences whose ids are in `planned`, and returns
                whether it did. If not, the request waits for a later pass.

        Returns:
            The plan, or None if nothing can run.
        """
        self.prefixes.busy.discard(self)  # if the last plan has not run
        planned: set[int] = set()
        deferred: set[int] = set()
        while True:
            waiting = [request for request in self.waiting if id(request) not in deferred]
            scheduled = list(self.schedule.schedule(waiting)) if waiting else []
            if self.cost_model is not None:
                scheduled = without_useless_rows(scheduled, self.cost_model)
            builder = self._build(scheduled, make_room, planned, deferred)
            if planned or not scheduled:
                break  # else none has room; those that the schedule has left out may have
        plan = builder.finish()
        if plan is not None:
            self.prefixes.busy.add(self)
            self._allow_multi_step(plan)
        return plan

    def _build(
        self,
        scheduled: list[ScheduledSpan],
        make_room: Callable[[ScoreRequest, set[int]], bool],
        planned: set[int],
        deferred: set[int],
    ) -> _Builder:
        """Reserve slots for `scheduled` and build its rows. Adds the sequences whose spans are in
        the pass to `planned`, and the ids of requests that have no room, or an error, to
        `deferred`."""
        # A draft model with weights of its own has none of the target's adapters.
        network = getattr(self.model, "network", None)
        has_adapters = network is None or bool(network.adapters)
        spec = self.model.spec
        builder = _Builder(scheduled, spec.input_size, spec.vocab_size, has_adapters)
        if len(scheduled) > 1 and not are_drafts(scheduled):
            self._share_steps(scheduled)
        for item in scheduled:
            request, span, count = item
            if id(request) in deferred or request not in self.waiting:
                continue
            if not self._reserve(request, span, count, make_room, planned):
                deferred.add(id(request))
                continue
            planned.add(request.sequence.root.id)
            try:
                if span.start and spec.starts_at_first_layer:
                    raise late_start_error(self.model.name)
                builder.add(item)
            except Exception as error:
                self.failed.append((request, error))
                deferred.add(id(request))
        return builder

    def _allow_multi_step(self, plan: Plan) -> None:
        """Allow further steps if all spans have some: drafts, or texts, within
        `MAX_MULTI_STEP_SECONDS`. Prompts have more than one row, so the first token of a text is
        not delayed."""
        spec, spans = plan.output_spec, list[MultiStepSpan]()
        for _, span, _ in plan.scheduled:
            if isinstance(span, MultiStepSpan) and span.reserved:
                spans.append(span)
        if not len(plan.scheduled) == len(spans) == len(spec.samples) == len(spec.logits):
            return
        limits = [1 + span.reserved for span in spans]
        if spans[0].min_probability is not None:
            spec.min_probabilities = [span.min_probability or 0.0 for span in spans]
        elif len(plan.rows) > len(spans):
            return
        else:
            spec.interrupt = self.interrupt
            max_passes = self._max_steps(len(spans))
            has_drafts = any(span.drafts is not None for span in spans)
            context = 0
            if has_drafts or any(one.sequence.needs_weight for one, _, _ in plan.scheduled):
                context = mean_length([request for request, _, _ in plan.scheduled])
                if len(spans) > 1 and self.cost_model is not None:
                    self._weigh_tokens(plan, context, self.cost_model)
            if has_drafts and (len(spans) == 1 or not spec.hidden):
                self._allow_drafts(plan, spans, context, max_passes)
            else:
                limits = [min(limit, max_passes) for limit in limits]
        if max(limits) > 1:
            plan.multi_step, spec.step_limits = spans, limits
            spec.end_tokens = spans[0].end_tokens
            if len(spans) > 1:
                spec.end_tokens = frozenset().union(*(span.end_tokens for span in spans))

    def _allow_drafts(
        self, plan: Plan, spans: list[MultiStepSpan], context: int, max_passes: int
    ) -> None:
        """Let the passes of a text that runs alone, or of several texts with one budget, have
        drafts. `context`: the mean of their positions."""
        spec, given = plan.output_spec, next(span.drafts for span in spans if span.drafts)
        rule = given.costs, given.min_gain, given.min_probability
        spec.drafts = [span.drafts or BurstDrafts([], *rule) for span in spans]
        first = spec.drafts[0]
        if len(spans) == 1:
            first.max_passes = min(max_passes, 1 + spans[0].reserved, first.max_passes)
            plan.states.clear()  # its passes return the states that a drafter reads
            spec.hidden.clear()
            return
        first.max_passes = max_passes
        if self.cost_model is not None:
            max_drafts = min(MAX_SHARED_DRAFTS, len(given.costs) - 1)
            costs = self.cost_model.pass_seconds(len(spans), max_drafts, context)
            first.costs = np.array(costs)
        for one, (request, _, _) in zip(spec.drafts, plan.scheduled, strict=True):
            one.weight = request.sequence.token_weight

    def _weigh_tokens(self, plan: Plan, context: int, costs: CostModel) -> None:
        """Set what a token of each of several sequences counts for: as much as one of another where
        sequences wait for one to end. It is at most 1, since it stays during the pass, in which a
        sequence that was to end last may overtake the others. `context`: the mean of their
        positions."""
        sequences = [request.sequence for request, _, _ in plan.scheduled]
        weights = [1.0] * len(sequences)
        if not costs.num_waiting():
            alone, together = (costs.pass_seconds(n, 0, context)[0] for n in (1, len(sequences)))
            remaining = [max(1, sequence.remaining) for sequence in sequences]
            weights = token_weights(remaining, alone, max(alone, together), costs.end_rate())
        for sequence, weight in zip(sequences, weights, strict=True):
            sequence.token_weight = min(1.0, weight)

    def _max_steps(self, num_sequences: int) -> int:
        """The number of steps over one row of each sequence that take `MAX_MULTI_STEP_SECONDS`.
        Steps of a number of sequences that has not run take as long as those of the next larger
        one."""
        known = self._step_seconds
        larger = [n for n in known if n >= num_sequences]
        return max(1, int(MAX_MULTI_STEP_SECONDS / known[min(larger)])) if larger else 1

    def _share_steps(self, scheduled: list[ScheduledSpan]) -> None:
        """Set how many further tokens each of several sequences may have in a pass: one in each of
        its further steps, and more where drafts may be accepted."""
        spans = [span for _, span, _ in scheduled if isinstance(span, MultiStepSpan)]
        num_steps = self._num_shared_steps(scheduled)
        has_drafts = num_steps > 0 and any(span.drafts is not None for span in spans)
        for span in spans:
            num_further = max(num_steps - 1, int(has_drafts))
            if span.drafts is not None:
                span.drafts.drafter = None  # it drafts for a single sequence
                num_further = 2 * num_steps + MAX_SHARED_DRAFTS if has_drafts else 0
            span.extra_tokens = min(span.extra_tokens, num_further)

    def _num_shared_steps(self, scheduled: list[ScheduledSpan]) -> int:
        """The number of steps of a pass over one row of each of several sequences, if all of them
        allow some and no other request waits; else 0."""
        if not 1 < len(scheduled) == len(self.waiting) <= MAX_SEQUENCES:
            return 0
        num_steps = self._max_steps(len(scheduled))
        for request, span, count in scheduled:
            if not can_go_on(span, request, count) or count > 1:
                return 0
            if span.min_probability is not None:
                return 0
            num_steps = min(num_steps, 1 + span.extra_tokens)
        return num_steps

    def run(self, plan: Plan) -> Output | None:
        """Run the pass; None if all its rows have left it. May be called on another thread."""
        with self.turns.lock:
            output = self._run(plan)
            return None if output is None else self.turns.kept(output, plan.output_spec)

    def _run(self, plan: Plan) -> Output | None:
        start = perf_counter()
        try:
            size = self._range_size(plan)
            output: Output | None
            load = self.prefixes.load
            if load is not None and load.is_in_main_memory and has_layer_ranges(plan, self.model):
                load.start()
                size = size or predicted_range_size(plan.scheduled)
            else:
                self.prefixes.finish_load()
            if size is None:
                output = self.model.run(plan.rows, self.pool.cache, plan.output_spec)
            else:
                before = partial(self._before_range, plan, load)
                output = run_in_ranges(plan, self.model, self.pool.cache, size, before)
        finally:
            self.prefixes.finish_load()
            self.prefixes.busy.discard(self)
        plan.seconds = perf_counter() - start
        return output

    def choose_threads(self, plan: Plan) -> None:
        """Choose the number of threads of a pass, where prompts have passes of their own. A pass
        that runs alone has all threads. Otherwise the schedule chooses how many the other requests
        have beside a pass of prompts, which has the rest."""
        main = self.main
        if main.prompts is None:
            return
        executor: Any = self.model.executor  # type: ignore[attr-defined]
        executor.threads_in_use = executor.threads
        if not plan.is_alone:
            decodes, prompts = main.waiting, main.prompts.waiting
            num = main.schedule.decode_threads(decodes, prompts, executor.threads, main.thread_cost)
            executor.threads_in_use = num if main is self else executor.threads - num

    def _range_size(self, plan: Plan) -> int | None:
        """The number of layers per range of the pass; None: it runs as a whole."""
        size = self.schedule.range_size(plan.scheduled)
        return size if size is not None and has_layer_ranges(plan, self.model) else None

    def _before_range(self, plan: Plan, load: LayerLoad | None, stop: int) -> np.ndarray | None:
        """Wait for restored keys and values of the layers before `stop`, and remove the rows that
        leave the pass for new sequences; returns the indices of the others if there are any such
        rows."""
        if load is not None:
            load.wait(stop)
        arrivals = plan.arrivals()
        leaving = {
            request
            for request, _, _ in plan.scheduled
            if any(self.schedule.yields(request, arrived) for arrived in arrivals)
        }
        return plan.remove(leaving) if leaving else None

    def commit(self, plan: Plan, output: Output) -> list[tuple[ScoreRequest, Scores]]:
        """Update the caches after a pass and return the requests that are now complete, with their
        scores."""
        if plan.multi_step:
            for one, tokens in zip(plan.multi_step, output.steps, strict=False):
                one.multi_step_tokens = tokens
            for one, probabilities in zip(plan.multi_step, output.step_probabilities, strict=False):
                one.probabilities = probabilities
            drafts = plan.output_spec.drafts
            plan.num_passes = output.num_passes
            if drafts and drafts[0].rows:
                plan.further_rows = [sum(one.rows) - 1 for one in drafts]
            else:
                plan.further_rows = [plan.num_passes - 1] * len(plan.scheduled)
        if plan.num_rows == len(plan.scheduled) or plan.multi_step:
            seconds, num = plan.seconds / plan.num_passes, len(plan.scheduled)
            known = self._step_seconds.setdefault(num, seconds)
            self._step_seconds[num] = known + STEP_RATE * (seconds - known)
        self.main.num_passes += plan.num_passes
        self.main.num_rows += plan.num_rows
        self.main.seconds += plan.seconds
        logits = output.logits
        sampled = [-1] * len(logits)
        for spec, token in zip(plan.output_spec.samples, output.sampled, strict=False):
            sampled[spec.row] = token
        outputs: dict[Span, SpanOutput] = {}
        advanced: list[ScoreRequest] = []
        for i, (request, span, count) in enumerate(plan.scheduled):
            exit_hidden = None
            if span.is_partial:
                exit_hidden = to_host(output.hidden[span.stop][plan.captured[span.stop][i]])
            rows = plan.output_rows[i]
            first = plan.first_output[i]
            span_logits = logits[first : first + (len(rows) if span.logits else 0)]
            span_hidden = {
                layer: self._select_rows(
                    output.hidden[layer][plan.captured[layer][i]], span, rows, layer
                )
                for layer in span.capture_layers
            }
            self._observe_states(plan, i, output)
            span.complete(exit_hidden, count)
            if request not in self.waiting:  # dropped during the pass
                continue
            if span.remaining and rows:
                self._store_partial(span, span_logits, span_hidden)
            elif not span.remaining:
                outputs[span] = SpanOutput(
                    span_logits, span_hidden, sampled[first : first + len(span_logits)]
                )
            if not advanced or advanced[-1] is not request:
                advanced.append(request)
        completed = []
        for request in advanced:
            if request.num_rows == 0:
                self.waiting.remove(request)
                completed.append((request, self._assemble(request, outputs)))
            else:
                for spans in request.groups:
                    for span in spans:
                        if span in outputs and len(span.output_rows):
                            self._store_partial(span, outputs[span].logits, outputs[span].hidden)
        return completed

    def _observe_states(self, plan: Plan, i: int, output: Output) -> None:
        """Pass the captured states of a span's rows to the sequence's drafters, before the span is
        completed, unless its sequence has released the cache during the pass."""
        request, span, _ = plan.scheduled[i]
        draft_states, rows = request.sequence.draft_states, plan.output_rows[i]
        drafts = plan.output_spec.drafts
        drafter = drafts[0].drafter if drafts else None
        if drafter is not None and drafter.known_states is not None and request in self.waiting:
            for states in draft_states.values():
                if states.chains is drafter.chains:
                    states.keep(drafter.first, drafter.num_read, drafter.known_states)
            return
        own = draft_states.get(self.name)
        is_read = i in plan.states or (own is not None and own.has_own and rows)
        if not is_read or span.kv_cache not in request.sequence.kv_caches(self.name):
            return
        if i in plan.states:
            first, slices = plan.states[i]
            taps = zip(span.state_layers, slices, strict=True)
            parts = {layer: to_host(output.hidden[layer][part]) for layer, part in taps}
            if span.other_states is not None:
                span.other_states |= {layer: rows.copy() for layer, rows in parts.items()}
                parts = span.other_states
            for states in draft_states.values():
                if parts.keys() >= set(states.layers):
                    states.observe_target(span, first, [parts[layer] for layer in states.layers])
        elif own is not None:
            depth = self.model.spec.num_layers
            own.observe_draft(span, rows, to_host(output.hidden[depth][plan.captured[depth][i]]))

    @staticmethod
    def _select_rows(rows: Array, span: Span, output_rows: list[int], layer: int) -> Array:
        if span.is_partial and layer == span.stop:
            return rows[[row - span.done for row in output_rows]]
        return rows

    def _reserve(
        self,
        request: ScoreRequest,
        span: Span,
        count: int,
        make_room: Callable[[ScoreRequest, set[int]], bool],
        planned: set[int],
    ) -> bool:
        while True:
            try:
                span.reserve(count)
                return True
            except PoolFull:
                if not make_room(request, planned):
                    return False
            except Exception as error:
                self.failed.append((request, error))
                return False

    def _store_partial(self, span: Span, logits: Array, hidden: dict[int, Array]) -> None:
        partial = self._partial_outputs.setdefault(span, PartialOutput())
        partial.logits.append(to_host(logits).copy())
        for layer, rows in hidden.items():
            partial.hidden.setdefault(layer, []).append(to_host(rows).copy())

    def _assemble(self, request: ScoreRequest, outputs: dict[Span, SpanOutput]) -> Scores:
        def gather(spans: list[Span]) -> SpanOutput:
            logits: list[Array] = []
            hidden: dict[int, list[np.ndarray]] = {}
            sampled: list[int] = []
            for span in spans:
                partial = self._partial_outputs.pop(span, PartialOutput())
                last = outputs.get(span)
                logits += partial.logits
                sampled += [-1] * sum(map(len, partial.logits))
                if last is not None and len(last.logits):
                    logits.append(last.logits)
                    sampled += last.sampled
                for layer in span.capture_layers:
                    rows = partial.hidden.get(layer, [])
                    hidden.setdefault(layer, []).extend(rows)
                    if last is not None and layer in last.hidden:
                        hidden[layer].append(last.hidden[layer])
            joined = {layer: _concat(rows) for layer, rows in hidden.items()}
            if len(logits) == 1:
                return SpanOutput(logits[0], joined, sampled)
            empty = np.empty((0, self.model.spec.num_logits), np.float32)
            return SpanOutput(_concat(logits) if logits else empty, joined, sampled)

        own = gather(request.groups[0])
        companions = [gather(spans).logits for spans in request.groups[1:]]
        head_tokens = getattr(self.model, "head_tokens", None)
        return Scores(request, own.logits, own.hidden, companions, own.sampled, head_tokens)


def _concat(rows: list[Array]) -> Array:
    return rows[0] if len(rows) == 1 else np.concatenate([to_host(part) for part in rows])


def are_drafts(scheduled: list[ScheduledSpan]) -> bool:
    """Whether the spans are drafts for several sequences, which the backend may go on with."""
    if not 1 < len(scheduled) <= MAX_SEQUENCES:
        return False
    return all(
        can_go_on(span, request, count) and span.min_probability is not None
        for request, span, count in scheduled
    )


def can_go_on(span: Span, request: ScoreRequest, count: int) -> TypeGuard[MultiStepSpan]:
    """Whether a span, of which `count` rows run, may have further steps beside others."""
    if not isinstance(span, MultiStepSpan) or not span.extra_tokens or count != span.remaining:
        return False
    return span.variant is None and not span.is_partial and request.groups == [[span]]


class _Builder:
    """Builds the rows of a pass, span by span."""

    def __init__(
        self,
        scheduled: list[ScheduledSpan],
        input_size: int,
        vocab_size: int,
        has_adapters: bool,
    ) -> None:
        self._vocab_size = vocab_size
        capacity = sum(count for _, _, count in scheduled)
        fields = np.empty((9, capacity), np.int32)
        has_embeddings = any(
            span.inputs is not None or span.states is not None for _, span, _ in scheduled
        )
        has_adapters = has_adapters and any(
            request.sequence.adapter >= 0 or span.adapters is not None
            for request, span, _ in scheduled
        )
        has_variants = any(span.variant is not None for _, span, _ in scheduled)
        self._rows = Rows(
            tokens=fields[0],
            positions=fields[1],
            slots=fields[2],
            tables=[],
            table=fields[3],
            prefix=fields[4],
            tails=np.empty(0, np.int32),
            tail_start=fields[5],
            tail_length=fields[6],
            start=fields[7],
            stop=fields[8],
            inputs=np.empty((capacity, input_size), np.float32) if has_embeddings else None,
            adapters=np.full(capacity, -1, np.int32) if has_adapters else None,
            variant=np.full(capacity, -1, np.int32) if has_variants else None,
            guides=[None] * capacity if has_variants else None,
        )
        self._num_rows = 0
        self._scheduled: list[ScheduledSpan] = []
        self._output_rows: list[list[int]] = []
        self._first_output: list[int] = []
        self._logits_rows: list[int] = []
        self._samples: list[SampleSpec] = []
        self._hidden_rows: dict[int, list[int]] = {}
        self._captured: dict[int, dict[int, slice]] = {}
        self._states: dict[int, tuple[int, list[slice]]] = {}

    def add(self, item: ScheduledSpan) -> None:
        """Append the next rows of a span whose slots are reserved. If it raises, nothing has been
        appended."""
        request, span, count = item
        offset, index = self._num_rows, len(self._scheduled)
        span.write_rows(self._rows, offset, count)
        tokens = self._rows.tokens[offset : offset + count]
        if span.inputs is None and tokens.view(np.uint32).max() >= self._vocab_size:  # or below 0
            invalid = next(token for token in tokens if not 0 <= token < self._vocab_size)
            size = self._vocab_size
            raise InvalidRequestError(f"token {invalid} is not in the vocabulary of {size}")
        first = span.done
        output_rows = [row for row in span.output_rows if first <= row < first + count]
        sample_specs = (
            request.sample_specs(span, output_rows, len(self._logits_rows))
            if span.logits and output_rows
            else []
        )
        if self._rows.adapters is not None:
            own = request.sequence.adapter
            chosen = own if span.adapters is None else span.adapters[first : first + count]
            self._rows.adapters[offset : offset + count] = chosen
        if self._rows.variant is not None:
            self._add_variant(span, offset, first, count)
        pass_rows = [offset + row - first for row in output_rows]
        self._first_output.append(len(self._logits_rows))
        if span.logits:
            self._samples += sample_specs
            self._logits_rows += pass_rows
        for layer in span.capture_layers:
            if not (span.is_partial and layer == span.stop):
                self._capture(index, layer, pass_rows)
        if span.is_partial:
            self._capture(index, span.stop, list(range(offset, offset + count)))
        if span.state_layers and len(span) - span.num_states < first + count:
            begin = max(first, len(span) - span.num_states)
            rows = list(range(offset + begin - first, offset + count))
            slices = [self._take(layer, rows) for layer in span.state_layers]
            self._states[index] = begin, slices
        self._scheduled.append(item)
        self._output_rows.append(output_rows)
        self._num_rows += count

    def _add_variant(self, span: Span, offset: int, first: int, count: int) -> None:
        """Set the variant of a span's rows, and their guides if it is a route."""
        if span.variant is None:
            return
        assert self._rows.variant is not None and self._rows.guides is not None
        variants, chosen = self._rows.variants, span.variant
        if chosen not in variants:
            variants.append(chosen)
        self._rows.variant[offset : offset + count] = variants.index(chosen)
        if span.guides:
            self._rows.guides[offset : offset + count] = span.guides[first : first + count]

    def finish(self) -> Plan | None:
        """The plan, or None if nothing was added."""
        if not self._scheduled:
            return None
        rows, num_rows = self._rows, self._num_rows
        if num_rows < len(rows):
            for name in _ROW_FIELDS:
                if getattr(rows, name) is not None:
                    setattr(rows, name, getattr(rows, name)[:num_rows])
        hidden = {layer: np.array(index, np.int32) for layer, index in self._hidden_rows.items()}
        output_spec = OutputSpec(np.array(self._logits_rows, np.int32), hidden, self._samples)
        return Plan(
            self._scheduled,
            rows,
            output_spec,
            self._output_rows,
            self._first_output,
            self._captured,
            self._states,
        )

    def _capture(self, item: int, layer: int, pass_rows: list[int]) -> None:
        self._captured.setdefault(layer, {})[item] = self._take(layer, pass_rows)

    def _take(self, layer: int, pass_rows: list[int]) -> slice:
        """Capture the hidden states of rows; returns where they are in those of the layer."""
        rows = self._hidden_rows.setdefault(layer, [])
        rows += pass_rows
        return slice(len(rows) - len(pass_rows), len(rows))


_ROW_FIELDS = (
    "tokens",
    "positions",
    "slots",
    "table",
    "prefix",
    "tail_start",
    "tail_length",
    "start",
    "stop",
    "inputs",
    "adapters",
    "variant",
    "guides",
)
