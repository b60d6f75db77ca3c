"""Offline requests get the rows that online requests leave (Qiao et al., ConServe,
arXiv:2410.01228)."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import RowBudget, ScheduledSpan, fit_spans
from anydecode.engine.schedules.priority import Priority
from anydecode.scoring.score import ScoreRequest


@register(
    Card(
        "online-offline",
        "serving",
        paper="Qiao et al. 2024, ConServe, arXiv:2410.01228",
        exactness="token-exact",
        summary="Requests with a priority above 0 are offline and get the remaining rows.",
        deviations=(
            "offline rows are preempted at the end of a pass, not within it",
            "a preempted offline request is recomputed from its cached prefix; nothing is copied to"
            " host memory",
        ),
    )
)
class OnlineOffline(Priority):
    """Schedules online requests (priority 0 or less) as if alone; offline requests fill the rest of
    the pass.

    Args:
        row_budget: Maximum number of rows per pass.
        short: Requests of more rows count as prompts.
        offline: Maximum number of offline rows per pass; 0 for all remaining rows.
    """

    def __init__(self, row_budget: int = 512, short: int = 64, offline: int = 0) -> None:
        super().__init__(row_budget, short)
        self.offline = offline

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        online = [request for request in waiting if request.sequence.priority <= 0]
        rows = 0
        for item in super().schedule(online):
            rows += item[2]
            yield item
        left = self.row_budget - rows
        if left > 0:
            left = min(left, self.offline or left)
            offline = [request for request in waiting if request.sequence.priority > 0]
            offline.sort(
                key=lambda request: (request.num_rows > self.short, request.sequence.priority)
            )
            yield from fit_spans(offline, RowBudget(left, started=rows > 0))
