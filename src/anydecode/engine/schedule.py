"""Which waiting scores go into the next pass, and how many of their rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import ScoreRequest
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.span import Span

#: A span and how many of its remaining rows to run.
ScheduledSpan = tuple[ScoreRequest, Span, int]


class Schedule(ABC):
    """Chooses the pieces of a pass. The lane takes them in order, until memory is short. The
    target's schedule also says who of those that wait is admitted next, and who gives way when
    memory runs out."""

    @abstractmethod
    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        """The next pass, out of the scores that wait, in the order they came."""

    def next_job(self, waiting: Seq[Sequence]) -> int:
        """Which of the waiting sequences is admitted next: the one that came first."""
        return 0

    def admitted(self, sequence: Sequence) -> None:  # noqa: B027  most schedules keep no account
        """Told of a sequence that starts, or starts again."""

    def victim(self, running: Seq[Sequence]) -> int:
        """Which of the running sequences is preempted: the one that came last."""
        return len(running) - 1


class DecodesFirst(Schedule):
    """Short scores first, then prompts in the order they came, in chunks that fill the row budget.

    Nobody who already speaks waits for someone else's prompt (Agrawal et al., Sarathi-Serve,
    arXiv:2403.02310, without its fixed decode share).
    """

    def __init__(self, row_budget: int = 512, short: int = 64) -> None:
        self.row_budget = row_budget
        self.short = short

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        order = sorted(waiting, key=lambda s: (s.num_rows > self.short, s.sequence.priority))
        yield from fill(order, RowBudget(self.row_budget))


@dataclass(eq=False)
class RowBudget:
    """How many rows a pass may still take. What cannot be divided goes in whole once, even if it
    alone is more than a budget."""

    left: int
    started: bool = False

    def __post_init__(self) -> None:
        if self.left < 1:
            raise InvalidRequestError(f"a pass needs a budget of at least one row, not {self.left}")

    def take(self, span: Span) -> int:
        """How many rows of `span` go into the pass."""
        count = span.remaining
        if count > self.left:
            if span.divisible:
                count = self.left
            elif self.started:
                return 0
        self.left = max(0, self.left - count)
        self.started = self.started or count > 0
        return count


def fill(scores: Seq[ScoreRequest], budget: RowBudget) -> Iterator[ScheduledSpan]:
    """As much of `scores`, in this order, as `budget` has room for."""
    for score in scores:
        for spans in score.groups:
            for span in spans:
                count = budget.take(span) if span.remaining else 0
                if count:
                    yield score, span, count
                if span.remaining > count:
                    break


def whole(score: ScoreRequest) -> Iterator[ScheduledSpan]:
    """Every row that is left of `score`."""
    for spans in score.groups:
        for span in spans:
            if span.remaining:
                yield score, span, span.remaining
