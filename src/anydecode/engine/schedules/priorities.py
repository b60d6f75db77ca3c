"""Who comes first: urgency, tenants' fair shares, and work that can wait.

Fair shares: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv:2401.00588.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import DecodesFirst, RowBudget, ScheduledSpan, fill
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import ScoreRequest
from anydecode.scoring.sequence import Sequence


def most_urgent(sequences: Seq[Sequence]) -> int:
    """The first of those with the smallest `priority`."""
    return min(range(len(sequences)), key=lambda i: sequences[i].priority)


def least_urgent(sequences: Seq[Sequence]) -> int:
    """The last of those with the largest `priority`."""
    return max(range(len(sequences)), key=lambda i: (sequences[i].priority, i))


@register(
    Card(
        "priority",
        "serving",
        paper="common practice; no paper",
        exactness="token-exact",
        summary="Smaller priority numbers are admitted, filled and kept first.",
    )
)
class Priority(DecodesFirst):
    """`DecodesFirst`, with admission and preemption by the request's `priority` too."""

    def next_job(self, waiting: Seq[Sequence]) -> int:
        return most_urgent(waiting)

    def victim(self, running: Seq[Sequence]) -> int:
        return least_urgent(running)


@register(
    Card(
        "online-offline",
        "serving",
        paper="Qiao et al. 2024, ConServe, arXiv:2410.01228",
        exactness="token-exact",
        summary="Requests with a priority above 0 are offline and get the rows that online leaves.",
        deviations=(
            "offline rows give way at the end of a pass, not within it",
            "a preempted offline request is computed anew from its shared prefix; nothing is copied"
            " to host memory",
        ),
    )
)
class OnlineOffline(Priority):
    """Online requests (priority 0 or less) as if alone; offline ones fill the rest of the pass,
    with at most `offline` rows (0: all that is left)."""

    def __init__(self, row_budget: int = 512, short: int = 64, offline: int = 0) -> None:
        super().__init__(row_budget, short)
        self.offline = offline

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        online = [score for score in waiting if score.sequence.priority <= 0]
        rows = 0
        for piece in super().schedule(online):
            rows += piece[2]
            yield piece
        left = self.row_budget - rows
        if left > 0:
            left = min(left, self.offline or left)
            offline = [score for score in waiting if score.sequence.priority > 0]
            offline.sort(key=lambda score: (score.num_rows > self.short, score.sequence.priority))
            yield from fill(offline, RowBudget(left, started=rows > 0))


@register(
    Card(
        "fair",
        "serving",
        paper="Sheng et al. 2024, Fairness in Serving Large Language Models, arXiv:2401.00588",
        exactness="token-exact",
        summary="The tenant that was served least is admitted next (virtual token counter).",
        deviations=(
            "a tenant is a prefix-cache namespace, which the server makes of the API key",
            "tokens are charged between passes, when their sequence's text has grown",
        ),
    )
)
class Fair(DecodesFirst):
    """Counts what every tenant got: `prompt` per prompt token, `output` per token said. A tenant
    that comes back is lifted to the least served of those that wait, so idling earns no credit."""

    def __init__(
        self, row_budget: int = 512, short: int = 64, prompt: float = 1.0, output: float = 2.0
    ) -> None:
        super().__init__(row_budget, short)
        if prompt < 0 or output < 0:
            raise InvalidRequestError("the weights of fair must not be negative")
        self.prompt, self.output = prompt, output
        self.served: dict[Hashable, float] = {}
        self._queued: set[Hashable] = set()
        self._left: Hashable = None
        self._charged: dict[int, tuple[Sequence, int]] = {}

    def next_job(self, waiting: Seq[Sequence]) -> int:
        self._settle()
        tenants = [sequence.namespace for sequence in waiting]
        for tenant in dict.fromkeys(tenants):
            if tenant not in self._queued:
                self._lift(tenant)
                self._queued.add(tenant)
        self._queued &= set(tenants)
        return min(range(len(waiting)), key=lambda i: self.served[tenants[i]])

    def admitted(self, sequence: Sequence) -> None:
        tenant = sequence.namespace
        if sequence.id not in self._charged:
            self.served[tenant] = self.served.get(tenant, 0.0) + self.prompt * len(sequence.prompt)
            self._charged[sequence.id] = (sequence, len(sequence.tokens))
        self._left = tenant

    def _lift(self, tenant: Hashable) -> None:
        floor = min((self.served[other] for other in self._queued), default=None)
        if floor is None:
            floor = self.served.get(self._left, 0.0)
        self.served[tenant] = max(self.served.get(tenant, 0.0), floor)

    def _settle(self) -> None:
        for key, (sequence, counted) in list(self._charged.items()):
            grown = len(sequence.tokens) - counted
            self.served[sequence.namespace] += self.output * grown
            if sequence.finished:
                del self._charged[key]
            else:
                self._charged[key] = (sequence, counted + grown)
