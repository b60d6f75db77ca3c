"""Scheduling: which waiting score requests run in the next pass, and how many of their rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from anydecode.errors import InvalidRequestError, quoted
from anydecode.scoring.score import ScoreRequest
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.span import Span

#: A request, one of its spans, and how many of the span's remaining rows to run.
ScheduledSpan = tuple[ScoreRequest, Span, int]

#: `cost(rows, context, threads)`: duration in seconds of a pass with so many threads.
ThreadCost = Callable[[int, int, int], float]


class Schedule(ABC):
    """Selects the spans of each pass.

    Attributes:
        has_prompt_stream: Whether passes of prompts run at the same time as the others, where the
            model can run two passes at once.

    The model runner takes them in order until memory is short. The target's schedule also selects
    the waiting sequence to admit next, and the running sequence to preempt when memory is full.
    """

    has_prompt_stream = False

    @abstractmethod
    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        """Yield the spans of the next pass.

        Args:
            waiting: The unfinished score requests, in order of arrival.
        """

    def decode_threads(
        self,
        decodes: Seq[ScoreRequest],
        prompts: Seq[ScoreRequest],
        threads: int,
        cost: ThreadCost | None,
    ) -> int:
        """The number of threads of a pass of `decodes` that runs at the same time as one of
        `prompts`, which has the others of `threads`; by default 1.

        Args:
            decodes: The unfinished requests of the one pass.
            prompts: Those of the other.
            threads: The number of all threads, 2 or more.
            cost: The cost of passes; None if it was not measured.
        """
        return 1

    def submitted(self, sequence: Sequence, waiting: Iterable[Sequence]) -> None:  # noqa: B027
        """Called when a new sequence joins those that wait for admission, `waiting`."""

    def next_job(self, waiting: Seq[Sequence]) -> int:
        """Index of the waiting sequence to admit next; by default the first."""
        return 0

    def admitted(self, sequence: Sequence) -> None:  # noqa: B027  most schedules are stateless
        """Called when a sequence starts, or starts again after preemption."""

    def victim(self, running: Seq[Sequence]) -> int:
        """Index of the running sequence to preempt; by default the last."""
        return len(running) - 1

    def range_size(self, scheduled: Seq[ScheduledSpan]) -> int | None:
        """The number of layers after which rows may leave the pass over `scheduled`; by default it
        runs as a whole."""
        return None

    def yields(self, request: ScoreRequest, arrived: Sequence) -> bool:
        """Whether the rows of `request` leave a running pass because `arrived` was submitted. They
        run again in a later pass. Called on the thread that runs the pass."""
        return False


class DecodesFirst(Schedule):
    """Short requests (decodes) first, then prompts in order of arrival, in chunks that fill the row
    budget.

    Decodes never wait for another sequence's prompt (Agrawal et al., Sarathi-Serve,
    arXiv:2403.02310, without its fixed decode share).

    Args:
        row_budget: Maximum number of rows per pass.
        short: Requests of more rows count as prompts.

    Raises:
        InvalidRequestError: `row_budget` is no integer of 1 or more.
    """

    def __init__(self, row_budget: int = 512, short: int = 64) -> None:
        self.row_budget = RowBudget(row_budget).left
        self.short = short

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        order = sorted(waiting, key=lambda s: (s.num_rows > self.short, s.sequence.priority))
        yield from fit_spans(order, RowBudget(self.row_budget))


@dataclass(eq=False)
class RowBudget:
    """The number of rows that still fit into a pass. An indivisible span that is larger than the
    budget runs whole, if nothing else has been taken."""

    left: int
    started: bool = False

    def __post_init__(self) -> None:
        if type(self.left) is not int or self.left < 1:
            raise InvalidRequestError(
                f"the row budget is {quoted(self.left)}; allowed are whole numbers of 1 or more"
            )

    def take(self, span: Span) -> int:
        """Take rows of `span` from the budget. Returns how many run in the pass."""
        count = span.remaining
        if count > self.left:
            if span.divisible:
                count = self.left
            elif self.started:
                return 0
        self.left = max(0, self.left - count)
        self.started = self.started or count > 0
        return count


def fit_spans(requests: Seq[ScoreRequest], budget: RowBudget) -> Iterator[ScheduledSpan]:
    """The spans of `requests`, in this order, that fit into `budget`."""
    for request in requests:
        for spans in request.groups:
            for span in spans:
                count = budget.take(span) if span.remaining else 0
                if count:
                    yield request, span, count
                if span.remaining > count:
                    break


def whole(request: ScoreRequest) -> Iterator[ScheduledSpan]:
    """All remaining rows of `request`."""
    for spans in request.groups:
        for span in spans:
            if span.remaining:
                yield request, span, span.remaining
