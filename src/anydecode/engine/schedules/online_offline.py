"""Offline requests get the rows that online requests leave (Qiao et al., ConServe,
arXiv:2410.01228)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from anydecode.catalogue import Card, register
from anydecode.engine.layer_ranges import predicted_range_size
from anydecode.engine.schedule import RowBudget, ScheduledSpan, fit_spans
from anydecode.engine.schedules.pacing import (
    checked_stretch,
    is_prompt,
    rows_beside,
    rows_within,
)
from anydecode.engine.schedules.priority import Priority
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import ScoreRequest
from anydecode.scoring.sequence import Sequence


@register(
    Card(
        "online-offline",
        "serving",
        paper="Qiao et al. 2024, ConServe, arXiv:2410.01228",
        exactness="token-exact",
        use="LLM(schedule='online-offline') or anydecode serve --schedule online-offline",
        summary="Requests with a priority above 0 are offline: they get rows that delay others"
        " little.",
        deviations=(
            "by default the latency bound is a factor on the time of a pass without offline rows;"
            " `seconds` is an objective as in the paper",
            "between two layers offline rows leave a pass, and the online rows of the pass go on;"
            " but in models with recurrences, memories or embeddings in every layer, and in passes"
            " of several steps or routes, offline rows run to the end of the pass",
            "what a preempted offline request has computed stays in the prefix cache; with"
            " `prefix_spill` it is copied to main memory when its slots are reused, not as it is"
            " computed",
        ),
    )
)
class OnlineOffline(Priority):
    """Schedules online requests (priority 0 or less) as if alone; offline requests get further rows
    of the pass.

    Args:
        row_budget: Maximum number of rows per pass.
        short: Online requests of more rows count as prompts; offline, prompts of any length do.
        offline: Maximum number of offline rows per pass. By default, as many as extend the pass to
            `stretch` times its duration without them, by the measured pass costs on this machine;
            all rows of a pass without online requests.
        stretch: Allowed factor on the duration of a pass, more than 1.
        seconds: Maximum predicted duration of a pass with online and offline rows, in seconds, in
            place of `stretch`. Online rows alone may take longer; offline requests then wait.
        layers: Number of layers after which a pass with offline rows looks for new online requests.
            If there is one, offline rows leave the pass, and run again in a later one. By default,
            as many as take 5 ms, by the measured pass costs on this machine.

    Raises:
        InvalidRequestError: A parameter is out of range.
    """

    def __init__(
        self,
        row_budget: int = 512,
        short: int = 64,
        offline: int | None = None,
        stretch: float = 2.0,
        seconds: float | None = None,
        layers: int | None = None,
    ) -> None:
        super().__init__(row_budget, short)
        if offline is not None and offline < 1:
            raise InvalidRequestError(f"offline is {offline}; it must be 1 or more")
        if seconds is not None and not seconds > 0:
            raise InvalidRequestError(f"seconds is {seconds}; it must be more than 0")
        if layers is not None and layers < 1:
            raise InvalidRequestError(f"layers is {layers}; it must be 1 or more")
        self.layers = layers
        self.offline, self.stretch = offline, checked_stretch(stretch)
        self.seconds = seconds

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        online = [request for request in waiting if request.sequence.priority <= 0]
        rows = 0
        for item in super().schedule(online):
            rows += item[2]
            yield item
        left = self.row_budget - rows
        offline = [request for request in waiting if request.sequence.priority > 0]
        if left > 0 and offline:
            offline.sort(
                key=lambda request: (
                    request.num_rows > self.short or is_prompt(request),
                    request.sequence.priority,
                )
            )
            left = min(left, self._limit(online, offline, left))
            if left > 0:
                yield from fit_spans(offline, RowBudget(left, started=rows > 0))

    def range_size(self, scheduled: Seq[ScheduledSpan]) -> int | None:
        if all(request.sequence.priority <= 0 for request, _, _ in scheduled):
            return None
        if self.layers is not None:
            return self.layers
        return predicted_range_size(scheduled)

    def yields(self, request: ScoreRequest, arrived: Sequence) -> bool:
        return arrived.priority <= 0 < request.sequence.priority

    def _limit(self, online: list[ScoreRequest], offline: list[ScoreRequest], left: int) -> int:
        """The maximum number of rows of `offline` beside those of `online`."""
        if self.offline is not None:
            return self.offline
        if not online:
            return left
        if self.seconds is not None:
            return rows_within(self.seconds, online, offline)
        return rows_beside(online, offline, self.stretch)
