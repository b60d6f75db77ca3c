"""Chunked prefill together with running decodes: what SARATHI and Sarathi-Serve share."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.engine.schedule import RowBudget, Schedule, ScheduledSpan, fit_spans, whole
from anydecode.engine.schedules.pacing import checked_stretch, is_prompt, rows_beside
from anydecode.scoring.score import ScoreRequest


def begun(request: ScoreRequest) -> bool:
    """Whether some rows of `request` have run in an earlier pass."""
    return any(span.done for spans in request.groups for span in spans)


class Chunked(Schedule):
    """Chunked prefill with a row budget, for prompts of any length.

    Args:
        budget: Maximum number of rows per pass. By default, prompts get as many rows as increase
            the time between tokens by the factor `stretch`, by the measured pass costs on this
            machine.
        short: Other requests of more rows count as prompts too.
        stretch: Allowed factor on the time between tokens, more than 1.
    """

    def __init__(self, budget: int | None = None, short: int = 64, stretch: float = 2.0) -> None:
        self.budget = None if budget is None else RowBudget(budget).left
        self.short, self.stretch = short, checked_stretch(stretch)

    def split(
        self, waiting: list[ScoreRequest]
    ) -> tuple[list[ScoreRequest], list[ScoreRequest], list[ScoreRequest]]:
        """Returns decodes, started prompts and new prompts, each in order of arrival."""
        resumed = [request for request in waiting if begun(request)]
        fresh = [request for request in waiting if not begun(request)]
        decodes: list[ScoreRequest] = []
        prompts: list[ScoreRequest] = []
        for request in fresh:
            (prompts if self._is_prompt(request) else decodes).append(request)
        return decodes, resumed, prompts

    def _is_prompt(self, request: ScoreRequest) -> bool:
        return request.num_rows > self.short or is_prompt(request)

    def prefill(
        self, decodes: list[ScoreRequest], prompts: list[ScoreRequest]
    ) -> Iterator[ScheduledSpan]:
        """All `decodes`, then as many rows of `prompts` as the budget allows."""
        rows = 0
        for request in decodes:
            rows += request.num_rows
            yield from whole(request)
        if prompts:
            left = (
                rows_beside(decodes, prompts, self.stretch)
                if self.budget is None
                else self.budget - rows
            )
            if left > 0:
                yield from fit_spans(prompts, RowBudget(left, started=rows > 0))
