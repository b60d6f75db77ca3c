"""One model at work: what waits for it, the pass it runs, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from anydecode.engine.schedule import Piece, Schedule
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import Choice, Output, Rows, Want
from anydecode.memory.pool import Pool, PoolFull
from anydecode.memory.prefix import PrefixCache
from anydecode.scoring.score import Score, Scores
from anydecode.scoring.span import Span, Trail

#: Whoever reads along, wants to cancel or comes anew waits this many seconds at most for a backend
#: that goes on by itself (or for one pass, where that takes longer).
MOST_SECONDS = 0.02


@dataclass(eq=False)
class Plan:
    """One pass as plain data. Of `pieces[i]` the rows `wanted[i]` (indices into its span) are
    wanted; they stand from `answered[i]` on in the output."""

    pieces: list[Piece]
    rows: Rows
    want: Want
    wanted: list[list[int]]
    answered: list[int]
    tapped: dict[int, dict[int, slice]]  # layer -> piece -> its rows in that layer's output
    seconds: float = 0.0
    trail: Trail | None = None  # with which the backend may go on by itself
    num_passes: int = 1  # more where it has, with a row each

    @property
    def num_rows(self) -> int:
        return len(self.rows) + self.num_passes - 1


@dataclass(eq=False)
class Partly:
    """Rows of a span's answer that are already there, copied out of earlier passes."""

    logits: list[np.ndarray] = field(default_factory=list)
    hidden: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class Fresh(NamedTuple):
    """A span's answer by the pass that has finished it: logits, taps, and what the pass has picked
    of each row, -1 where it has not."""

    logits: np.ndarray
    hidden: dict[int, torch.Tensor]
    picked: list[int]


class Lane:
    """A model with its memory, its waiting scores, and one pass at a time."""

    def __init__(self, name: str, pool: Pool, schedule: Schedule) -> None:
        self.name = name
        self.pool = pool
        self.model = pool.model
        self.prefixes = PrefixCache(pool)
        self.schedule = schedule
        self.waiting: list[Score] = []
        self.failed: list[tuple[Score, Exception]] = []  # by their own fault, and why
        self.num_passes = 0
        self.num_rows = 0
        self.seconds = 0.0
        self._one_row = inf  # seconds that the last pass over one row took
        self._parts: dict[Span, Partly] = {}

    def add(self, score: Score) -> None:
        self.waiting.append(score)

    def drop(self, score: Score) -> None:
        """Forget a score, whether it waits or not."""
        if score in self.waiting:
            self.waiting.remove(score)
        for spans in score.groups:
            for span in spans:
                self._parts.pop(span, None)

    def plan(self, make_room: Callable[[Score, set[int]], bool]) -> Plan | None:
        """Reserve slots and lay out the rows of the next pass. When memory is short,
        `make_room(score, planned)` is asked to free some without touching the sequences `planned`
        (ids); where it cannot, the score waits. A score that cannot be laid out goes to `failed`,
        and the others run without it."""
        pieces = list(self.schedule.pieces(self.waiting))
        builder = _Builder(pieces, self.model.spec.hidden_size, self.model.spec.vocab_size)
        planned: set[int] = set()
        stuck: set[int] = set()
        for piece in pieces:
            score, span, count = piece
            if id(score) in stuck or score not in self.waiting:
                continue
            if len(pieces) > 1 and isinstance(span, Trail):
                span.ahead = 0  # no room for what the backend will not say in company
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
        self.prefixes.busy = plan is not None
        if plan is not None:
            self._let_follow(plan)
        return plan

    def _let_follow(self, plan: Plan) -> None:
        """Where a row is alone, let the backend go on with it for as long as nobody minds. An
        answer's first token is not kept waiting for the next."""
        trail = plan.pieces[0][1]
        if len(plan.rows) == 1 and isinstance(trail, Trail) and plan.want.choices:
            said = min(1 + trail.room, int(MOST_SECONDS / self._one_row))
            if said > 1:
                plan.trail, plan.want.said, plan.want.ends = trail, said, trail.ends

    def run(self, plan: Plan) -> Output:
        """The pass itself; safe to call on a thread of its own."""
        start = perf_counter()
        try:
            output = self.model.run(plan.rows, self.pool.cache, plan.want)
        finally:
            self.prefixes.busy = False
        plan.seconds = perf_counter() - start
        return output

    def commit(self, plan: Plan, output: Output) -> list[tuple[Score, Scores]]:
        """Hand the rows back; returns the scores that are now complete."""
        if plan.trail is not None:
            plan.trail.said = output.picks
            plan.num_passes = max(1, len(output.picks))
        if plan.num_rows == plan.num_passes:
            self._one_row = plan.seconds / plan.num_passes
        self.num_passes += plan.num_passes
        self.num_rows += plan.num_rows
        self.seconds += plan.seconds
        logits = output.logits.cpu().numpy()
        picked = [-1] * len(logits)
        for choice, token in zip(plan.want.choices, output.picks, strict=False):
            picked[choice.row] = token
        fresh: dict[Span, Fresh] = {}
        touched: list[Score] = []
        for i, (score, span, count) in enumerate(plan.pieces):
            stopped = None
            if span.is_partial:
                stopped = output.hidden[span.stop][plan.tapped[span.stop][i]]
            rows = plan.wanted[i]
            first = plan.answered[i]
            part = logits[first : first + (len(rows) if span.logits else 0)]
            taps = {
                layer: self._tapped(output.hidden[layer][plan.tapped[layer][i]], span, rows, layer)
                for layer in span.taps
            }
            span.settle(stopped, count)
            if score not in self.waiting:  # dropped while the pass was under way
                continue
            if span.remaining and rows:
                self._keep(span, part, taps)
            elif not span.remaining:
                fresh[span] = Fresh(part, taps, picked[first : first + len(part)])
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
                        if span in fresh and len(span.answers):
                            self._keep(span, fresh[span].logits, fresh[span].hidden)
        return done

    @staticmethod
    def _tapped(rows: torch.Tensor, span: Span, wanted: list[int], layer: int) -> torch.Tensor:
        if span.is_partial and layer == span.stop:
            return rows[[row - span.done for row in wanted]]
        return rows

    def _reserve(
        self,
        score: Score,
        span: Span,
        count: int,
        make_room: Callable[[Score, set[int]], bool],
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
        part = self._parts.setdefault(span, Partly())
        part.logits.append(logits.copy())
        for layer, rows in taps.items():
            part.hidden.setdefault(layer, []).append(rows.clone())

    def _assemble(self, score: Score, fresh: dict[Span, Fresh]) -> Scores:
        def collect(spans: list[Span]) -> Fresh:
            logits: list[np.ndarray] = []
            hidden: dict[int, list[torch.Tensor]] = {}
            picked: list[int] = []
            for span in spans:
                part = self._parts.pop(span, Partly())
                last = fresh.get(span)
                logits += part.logits
                picked += [-1] * sum(map(len, part.logits))
                if last is not None and len(last.logits):
                    logits.append(last.logits)
                    picked += last.picked
                for layer in span.taps:
                    rows = part.hidden.get(layer, [])
                    hidden.setdefault(layer, []).extend(rows)
                    if last is not None and layer in last.hidden:
                        hidden[layer].append(last.hidden[layer])
            joined = {layer: _join(rows) for layer, rows in hidden.items()}
            if len(logits) == 1:
                return Fresh(logits[0], joined, picked)
            empty = np.empty((0, self.model.spec.vocab_size), np.float32)
            return Fresh(np.concatenate(logits) if logits else empty, joined, picked)

        own = collect(score.groups[0])
        companions = [collect(spans).logits for spans in score.groups[1:]]
        return Scores(score, own.logits, own.hidden, companions, own.picked)


def _join(rows: list[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)


class _Builder:
    """Lays out the rows of a pass, span by span."""

    def __init__(self, pieces: list[Piece], hidden_size: int, vocab_size: int) -> None:
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
        self._pieces: list[Piece] = []
        self._wanted: list[list[int]] = []
        self._answered: list[int] = []
        self._logits: list[int] = []
        self._choices: list[Choice] = []
        self._hidden: dict[int, list[int]] = {}
        self._tapped: dict[int, dict[int, slice]] = {}

    def add(self, piece: Piece) -> None:
        """Append the next rows of a span whose slots have just been reserved. If it raises, nothing
        has been appended."""
        score, span, count = piece
        offset, index = self._num_rows, len(self._pieces)
        span.fill(self._rows, offset, count)
        tokens = self._rows.tokens[offset : offset + count]
        if span.inputs is None and tokens.view(np.uint32).max() >= self._vocab_size:  # or below 0
            wrong = next(token for token in tokens if not 0 <= token < self._vocab_size)
            size = self._vocab_size
            raise InvalidRequestError(f"token {wrong} is not in the vocabulary of {size}")
        done = span.done
        wanted = [row for row in span.answers if done <= row < done + count]
        choices = score.choices(span, wanted, len(self._logits)) if span.logits and wanted else []
        if self._rows.adapters is not None:
            self._rows.adapters[offset : offset + count] = score.sequence.adapter
        if self._rows.parallel is not None:
            self._rows.parallel[offset : offset + count] = span.parallel
        shifted = [offset + row - done for row in wanted]
        self._answered.append(len(self._logits))
        if span.logits:
            self._choices += choices
            self._logits += shifted
        for layer in span.taps:
            if not (span.is_partial and layer == span.stop):
                self._tap(index, layer, shifted)
        if span.is_partial:
            self._tap(index, span.stop, list(range(offset, offset + count)))
        self._pieces.append(piece)
        self._wanted.append(wanted)
        self._num_rows += count

    def finish(self) -> Plan | None:
        """The plan, or None if nothing was added."""
        if not self._pieces:
            return None
        rows, used = self._rows, self._num_rows
        if used < len(rows):
            for name in _PER_ROW:
                if getattr(rows, name) is not None:
                    setattr(rows, name, getattr(rows, name)[:used])
        hidden = {layer: np.array(index, np.int32) for layer, index in self._hidden.items()}
        want = Want(np.array(self._logits, np.int32), hidden, self._choices)
        return Plan(self._pieces, rows, want, self._wanted, self._answered, self._tapped)

    def _tap(self, piece: int, layer: int, index: list[int]) -> None:
        rows = self._hidden.setdefault(layer, [])
        self._tapped.setdefault(layer, {})[piece] = slice(len(rows), len(rows) + len(index))
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
