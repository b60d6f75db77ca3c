"""Prefill and decode on one device, each with a share that a cost model chose ahead.

Shi et al., "Nexus: Proactive Intra-GPU Disaggregation of Prefill and Decode in LLM Serving",
arXiv:2507.06608.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import RowBudget, Schedule, ScheduledSpan, fill, whole
from anydecode.engine.schedules.sarathi import begun
from anydecode.errors import InvalidRequestError
from anydecode.scoring.cost import default_table
from anydecode.scoring.score import ScoreRequest

#: Seconds of a pass by its number of rows.
Cost = Callable[[int], float]


def chosen_share(
    cost: Cost, decodes: int, prompt: int, shares: list[int], *, decode_first: bool, slack: float
) -> int:
    """How many prompt rows go beside `decodes` rows, of the ascending `shares`.

    A pass takes `cost(rows)`, which is the time between tokens; `prompt` rows take that times the
    number of passes. Decode first: from the smallest share up, the first whose prefill time is
    within `slack` times the best. Else from the largest down, the first whose time between tokens
    is within `slack` times the best.
    """
    between = {share: cost(decodes + share) for share in shares}
    prefill = {share: -(-prompt // share) * between[share] for share in shares}
    if decode_first:
        limit = slack * min(prefill.values())
        return next(share for share in shares if prefill[share] <= limit)
    limit = slack * min(between.values())
    return next(share for share in reversed(shares) if between[share] <= limit)


@register(
    Card(
        "nexus",
        "serving",
        paper="Shi et al. 2025, Nexus, arXiv:2507.06608",
        exactness="token-exact",
        summary="A cost model chooses what share of a pass prompts get; the shortest goes first.",
        deviations=(
            "the shares are rows of one pass on all cores, not sets of cores with a stream each:"
            " the row kernels have one team of threads",
            "costs are the machine's measured table; its slope takes the place of saturation points"
            " and of the bandwidth contention term",
            "a prompt's wait is counted in passes, so that the order does not depend on the clock",
        ),
    )
)
class Nexus(Schedule):
    """All decodes in every pass, and beside them the share of `row_budget` that the cost model
    allows: the shortest prefill while the time between tokens is within `beta` times its best; or,
    while more than `full` of the cache is in use, the shortest time between tokens while prefill is
    within `alpha` times its best. A share changes only by `change` or more. Prompts go by their
    remaining rows less `ageing` per pass waited."""

    def __init__(
        self,
        row_budget: int = 512,
        short: int = 64,
        alpha: float = 1.3,
        beta: float = 1.3,
        full: float = 0.7,
        steps: int = 32,
        change: float = 0.05,
        ageing: float = 16.0,
    ) -> None:
        if not 1 <= steps <= row_budget or min(alpha, beta) < 1 or min(change, ageing) < 0:
            raise InvalidRequestError(
                "nexus needs alpha and beta of 1 or more, and steps between 1 and row_budget"
            )
        self.row_budget, self.short = row_budget, short
        self.alpha, self.beta, self.full = alpha, beta, full
        self.shares = sorted({row_budget * (i + 1) // steps for i in range(steps)})
        self.change, self.ageing = change, ageing
        self._share = 0
        self._waited: dict[ScoreRequest, int] = {}

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        decodes = [s for s in waiting if s.num_rows <= self.short and not begun(s)]
        speaking = set(decodes)
        prompts = [score for score in waiting if score not in speaking]
        self._waited = {score: self._waited.get(score, -1) + 1 for score in prompts}
        for score in decodes:
            yield from whole(score)
        if prompts:
            rows = sum(score.num_rows for score in decodes)
            share = self._chosen(waiting, prompts, rows) if rows else self.row_budget
            prompts.sort(key=lambda s: s.num_rows - self.ageing * self._waited[s])
            yield from fill(prompts, RowBudget(share, started=rows > 0))

    def _chosen(self, waiting: list[ScoreRequest], prompts: list[ScoreRequest], rows: int) -> int:
        contexts = [spans[-1].context for score in waiting for spans in score.groups]
        held = sum(context.length for context in contexts)
        behind = held // len(contexts)
        cost_model = waiting[0].sequence.cost_model or _GUESS
        decode_first = held > self.full * contexts[0].pool.num_slots
        share = chosen_share(
            lambda count: cost_model.seconds(count, behind),
            rows,
            sum(score.num_rows for score in prompts),
            self.shares,
            decode_first=decode_first,
            slack=self.alpha if decode_first else self.beta,
        )
        if not self._share or abs(share - self._share) >= self.change * self._share:
            self._share = share
        return self._share


_GUESS = default_table()
