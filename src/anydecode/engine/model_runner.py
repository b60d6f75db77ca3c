"""One model at work: what waits for it, the pass it runs, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from anydecode.engine.schedule import Schedule, ScheduledSpan
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import Output, OutputSpec, Rows, SampleSpec
from anydecode.memory.pool import KVPool, PoolFull
from anydecode.memory.prefix import PrefixCache
from anydecode.scoring.score import ScoreRequest, Scores
from anydecode.scoring.span import MultiStepSpan, Span

#: Whoever reads along, wants to cancel or comes anew waits this many seconds at most for a backend
#: that goes on by itself (or for one pass, where that takes longer).
MAX_MULTI_STEP_SECONDS = 0.02


@dataclass(eq=False)
class Plan:
    """One pass as plain data. Of `pieces[i]` the rows `wanted[i]` (indices into its span) are
    wanted; they stand from `answered[i]` on in the output."""

    scheduled: list[ScheduledSpan]
    rows: Rows
    output_spec: OutputSpec
    output_rows: list[list[int]]
    first_output: list[int]
    captured: dict[int, dict[int, slice]]  # layer -> piece -> its rows in that layer's output
    seconds: float = 0.0
    multi_step: MultiStepSpan | None = None  # with which the backend may go on by itself
    num_passes: int = 1  # more where it has, with a row each

    @property
    def num_rows(self) -> int:
        return len(self.rows) + self.num_passes - 1


@dataclass(eq=False)
class PartialOutput:
    """Rows of a span's answer that are already there, copied out of earlier passes."""

    logits: list[np.ndarray] = field(default_factory=list)
    hidden: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class SpanOutput(NamedTuple):
    """A span's answer by the pass that has finished it: logits, taps, and what the pass has picked
    of each row, -1 where it has not."""

    logits: np.ndarray
    hidden: dict[int, torch.Tensor]
    sampled: list[int]


class ModelRunner:
    """A model with its memory, its waiting scores, and one pass at a time."""

    def __init__(self, name: str, pool: KVPool, schedule: Schedule) -> None:
        self.name = name
        self.pool = pool
        self.model = pool.model
        self.prefixes = PrefixCache(pool)
        self.schedule = schedule
        self.waiting: list[ScoreRequest] = []
        self.failed: list[tuple[ScoreRequest, Exception]] = []  # by their own fault, and why
        self.num_passes = 0
        self.num_rows = 0
        self.seconds = 0.0
        self._seconds_per_row = inf  # seconds that the last pass over one row took
        self._parts: dict[Span, PartialOutput] = {}

    def add(self, score: ScoreRequest) -> None:
        self.waiting.append(score)

    def drop(self, score: ScoreRequest) -> None:
        """Forget a score, whether it waits or not."""
        if score in self.waiting:
            self.waiting.remove(score)
        for spans in score.groups:
            for span in spans:
                self._parts.pop(span, None)

    def plan(self, make_room: Callable[[ScoreRequest, set[int]], bool]) -> Plan | None:
        """Reserve slots and lay out the rows of the next pass. When memory is short,
        `make_room(score, planned)` is asked to free some without touching the sequences `planned`
        (ids); where it cannot, the score waits. A score that cannot be laid out goes to `failed`,
        and the others run without it."""
        pieces = list(self.schedule.schedule(self.waiting))
        builder = _Builder(pieces, self.model.spec.hidden_size, self.model.spec.vocab_size)
        planned: set[int] = set()
        stuck: set[int] = set()
        for piece in pieces:
            score, span, count = piece
            if id(score) in stuck or score not in self.waiting:
                continue
            if len(pieces) > 1 and isinstance(span, MultiStepSpan):
                span.extra_tokens = 0  # no room for what the backend will not say in company
            if not self._reserve(score, span, count, make_room, planned):
                stuck.add(id(score))
                continue
            planned.add(score.sequence.root.id)
            try:
                builder.add(piece)
            except Exception as error:
                self.failed.append((score, error))
                stuck.add(id(score))
        plan = builder.finish()
        self.prefixes.is_busy = plan is not None
        if plan is not None:
            self._allow_multi_step(plan)
        return plan

    def _allow_multi_step(self, plan: Plan) -> None:
        """Where a row is alone, let the backend go on with it for as long as nobody minds. An
        answer's first token is not kept waiting for the next."""
        trail = plan.scheduled[0][1]
        if len(plan.rows) == 1 and isinstance(trail, MultiStepSpan) and plan.output_spec.samples:
            said = min(1 + trail.reserved, int(MAX_MULTI_STEP_SECONDS / self._seconds_per_row))
            if said > 1:
                plan.multi_step, plan.output_spec.num_steps, plan.output_spec.end_tokens = (
                    trail,
                    said,
                    trail.end_tokens,
                )

    def run(self, plan: Plan) -> Output:
        """The pass itself; safe to call on a thread of its own."""
        start = perf_counter()
        try:
            output = self.model.run(plan.rows, self.pool.cache, plan.output_spec)
        finally:
            self.prefixes.is_busy = False
        plan.seconds = perf_counter() - start
        return output

    def commit(self, plan: Plan, output: Output) -> list[tuple[ScoreRequest, Scores]]:
        """Hand the rows back; returns the scores that are now complete."""
        if plan.multi_step is not None:
            plan.multi_step.multi_step_tokens = output.sampled
            plan.num_passes = max(1, len(output.sampled))
        if plan.num_rows == plan.num_passes:
            self._seconds_per_row = plan.seconds / plan.num_passes
        self.num_passes += plan.num_passes
        self.num_rows += plan.num_rows
        self.seconds += plan.seconds
        logits = output.logits.cpu().numpy()
        picked = [-1] * len(logits)
        for choice, token in zip(plan.output_spec.samples, output.sampled, strict=False):
            picked[choice.row] = token
        fresh: dict[Span, SpanOutput] = {}
        touched: list[ScoreRequest] = []
        for i, (score, span, count) in enumerate(plan.scheduled):
            stopped = None
            if span.is_partial:
                stopped = output.hidden[span.stop][plan.captured[span.stop][i]]
            rows = plan.output_rows[i]
            first = plan.first_output[i]
            part = logits[first : first + (len(rows) if span.logits else 0)]
            taps = {
                layer: self._captured(
                    output.hidden[layer][plan.captured[layer][i]], span, rows, layer
                )
                for layer in span.capture_layers
            }
            span.complete(stopped, count)
            if score not in self.waiting:  # dropped while the pass was under way
                continue
            if span.remaining and rows:
                self._keep(span, part, taps)
            elif not span.remaining:
                fresh[span] = SpanOutput(part, taps, picked[first : first + len(part)])
            if not touched or touched[-1] is not score:
                touched.append(score)
        done = []
        for score in touched:
            if score.num_rows == 0:
                self.waiting.remove(score)
                done.append((score, self._assemble(score, fresh)))
            else:
                for spans in score.groups:
                    for span in spans:
                        if span in fresh and len(span.output_rows):
                            self._keep(span, fresh[span].logits, fresh[span].hidden)
        return done

    @staticmethod
    def _captured(rows: torch.Tensor, span: Span, wanted: list[int], layer: int) -> torch.Tensor:
        if span.is_partial and layer == span.stop:
            return rows[[row - span.done for row in wanted]]
        return rows

    def _reserve(
        self,
        score: ScoreRequest,
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
                if not make_room(score, planned):
                    return False
            except Exception as error:
                self.failed.append((score, error))
                return False

    def _keep(self, span: Span, logits: np.ndarray, taps: dict[int, torch.Tensor]) -> None:
        part = self._parts.setdefault(span, PartialOutput())
        part.logits.append(logits.copy())
        for layer, rows in taps.items():
            part.hidden.setdefault(layer, []).append(rows.clone())

    def _assemble(self, score: ScoreRequest, fresh: dict[Span, SpanOutput]) -> Scores:
        def collect(spans: list[Span]) -> SpanOutput:
            logits: list[np.ndarray] = []
            hidden: dict[int, list[torch.Tensor]] = {}
            picked: list[int] = []
            for span in spans:
                part = self._parts.pop(span, PartialOutput())
                last = fresh.get(span)
                logits += part.logits
                picked += [-1] * sum(map(len, part.logits))
                if last is not None and len(last.logits):
                    logits.append(last.logits)
                    picked += last.sampled
                for layer in span.capture_layers:
                    rows = part.hidden.get(layer, [])
                    hidden.setdefault(layer, []).extend(rows)
                    if last is not None and layer in last.hidden:
                        hidden[layer].append(last.hidden[layer])
            joined = {layer: _join(rows) for layer, rows in hidden.items()}
            if len(logits) == 1:
                return SpanOutput(logits[0], joined, picked)
            empty = np.empty((0, self.model.spec.vocab_size), np.float32)
            return SpanOutput(np.concatenate(logits) if logits else empty, joined, picked)

        own = collect(score.groups[0])
        companions = [collect(spans).logits for spans in score.groups[1:]]
        return Scores(score, own.logits, own.hidden, companions, own.sampled)


def _join(rows: list[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)


class _Builder:
    """Lays out the rows of a pass, span by span."""

    def __init__(self, pieces: list[ScheduledSpan], hidden_size: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        capacity = sum(count for _, _, count in pieces)
        fields = np.empty((9, capacity), np.int32)
        fed = any(span.inputs is not None for _, span, _ in pieces)
        adapted = any(score.sequence.adapter >= 0 for score, _, _ in pieces)
        parallel = any(span.parallel for _, span, _ in pieces)
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
            inputs=torch.empty(capacity, hidden_size) if fed else None,
            adapters=np.full(capacity, -1, np.int32) if adapted else None,
            parallel=np.zeros(capacity, np.int32) if parallel else None,
        )
        self._num_rows = 0
        self._scheduled: list[ScheduledSpan] = []
        self._output_rows: list[list[int]] = []
        self._first_output: list[int] = []
        self._logits: list[int] = []
        self._samples: list[SampleSpec] = []
        self._hidden: dict[int, list[int]] = {}
        self._captured: dict[int, dict[int, slice]] = {}

    def add(self, piece: ScheduledSpan) -> None:
        """Append the next rows of a span whose slots have just been reserved. If it raises, nothing
        has been appended."""
        score, span, count = piece
        offset, index = self._num_rows, len(self._scheduled)
        span.fill(self._rows, offset, count)
        tokens = self._rows.tokens[offset : offset + count]
        if span.inputs is None and tokens.view(np.uint32).max() >= self._vocab_size:  # or below 0
            wrong = next(token for token in tokens if not 0 <= token < self._vocab_size)
            size = self._vocab_size
            raise InvalidRequestError(f"token {wrong} is not in the vocabulary of {size}")
        done = span.done
        wanted = [row for row in span.output_rows if done <= row < done + count]
        choices = (
            score.sample_specs(span, wanted, len(self._logits)) if span.logits and wanted else []
        )
        if self._rows.adapters is not None:
            self._rows.adapters[offset : offset + count] = score.sequence.adapter
        if self._rows.parallel is not None:
            self._rows.parallel[offset : offset + count] = span.parallel
        shifted = [offset + row - done for row in wanted]
        self._first_output.append(len(self._logits))
        if span.logits:
            self._samples += choices
            self._logits += shifted
        for layer in span.capture_layers:
            if not (span.is_partial and layer == span.stop):
                self._capture(index, layer, shifted)
        if span.is_partial:
            self._capture(index, span.stop, list(range(offset, offset + count)))
        self._scheduled.append(piece)
        self._output_rows.append(wanted)
        self._num_rows += count

    def finish(self) -> Plan | None:
        """The plan, or None if nothing was added."""
        if not self._scheduled:
            return None
        rows, used = self._rows, self._num_rows
        if used < len(rows):
            for name in _PER_ROW:
                if getattr(rows, name) is not None:
                    setattr(rows, name, getattr(rows, name)[:used])
        hidden = {layer: np.array(index, np.int32) for layer, index in self._hidden.items()}
        output_spec = OutputSpec(np.array(self._logits, np.int32), hidden, self._samples)
        return Plan(
            self._scheduled,
            rows,
            output_spec,
            self._output_rows,
            self._first_output,
            self._captured,
        )

    def _capture(self, piece: int, layer: int, index: list[int]) -> None:
        rows = self._hidden.setdefault(layer, [])
        self._captured.setdefault(layer, {})[piece] = slice(len(rows), len(rows) + len(index))
        rows += index


_PER_ROW = (
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
    "parallel",
)
