"""Which waiting scores go into the next pass, and how many of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from anydecode.scoring.score import Score
from anydecode.scoring.span import Span

#: A span and how many of its remaining rows to run.
Piece = tuple[Score, Span, int]


class Schedule(Protocol):
    """Chooses the pieces of a pass. The lane takes them in order, until memory is short."""

    def pieces(self, waiting: list[Score]) -> Iterator[Piece]: ...


class DecodesFirst:
    """Short scores first, then prompts in the order they came, in chunks that fill the row budget.

    Nobody who already speaks waits for someone else's prompt (Agrawal et al., Sarathi-Serve,
    arXiv:2403.02310, without its fixed decode share).
    """

    def __init__(self, row_budget: int = 512, short: int = 64) -> None:
        self.row_budget = row_budget
        self.short = short

    def pieces(self, waiting: list[Score]) -> Iterator[Piece]:
        budget = self.row_budget
        order = sorted(waiting, key=lambda score: (score.num_rows > self.short, score.sequence.priority))
        started = False
        for score in order:
            for spans in score.groups:
                for span in spans:
                    count = span.remaining
                    if count > budget:
                        if span.divisible:
                            count = budget
                        elif started:
                            count = 0
                    if count == 0 and span.remaining:
                        break
                    if count:
                        yield score, span, count
                        started = True
                        budget = max(0, budget - count)
                    if span.remaining > count:
                        break
