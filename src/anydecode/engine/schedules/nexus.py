"""Prefill and decode on one device, in two streams or with shares of each pass.

Shi et al., "Nexus: Proactive Intra-GPU Disaggregation of Prefill and Decode in LLM Serving",
arXiv:2507.06608.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import RowBudget, Schedule, ScheduledSpan, fit_spans, whole
from anydecode.engine.schedules.chunked import begun
from anydecode.engine.schedules.pacing import is_prompt
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import ScoreRequest

#: Duration of a pass in seconds, by its number of rows.
Cost = Callable[[int], float]


def chosen_share(
    cost: Cost, decodes: int, prompt: int, shares: list[int], *, decode_first: bool, slack: float
) -> int:
    """The number of prompt rows per pass, one of the ascending `shares`.

    The time between tokens is the duration of a pass, `cost(rows)`; the prefill time is that times
    the number of passes for `prompt` rows. With `decode_first`: the smallest share whose prefill
    time is within `slack` times the best. Else: the largest share whose time between tokens is
    within `slack` times the best.
    """
    inter_token = {share: cost(decodes + share) for share in shares}
    prefill = {share: -(-prompt // share) * inter_token[share] for share in shares}
    if decode_first:
        limit = slack * min(prefill.values())
        return next(share for share in shares if prefill[share] <= limit)
    limit = slack * min(inter_token.values())
    return next(share for share in reversed(shares) if inter_token[share] <= limit)


@register(
    Card(
        "nexus",
        "serving",
        paper="Shi et al. 2025, Nexus, arXiv:2507.06608",
        exactness="token-exact",
        use="LLM(schedule='nexus') or anydecode serve --schedule nexus",
        summary="Prompts and decodes run in two streams at the same time, or a cost model chooses"
        " the prompts' share of each pass; shortest prompts first.",
        missing=(
            "with more than two cores, a split that the cost model chooses: decodes have one",
        ),
        deviations=(
            "prompts and decodes run in two streams with the native kernels on two threads or more,"
            " but for models with recurrences; then decodes have one thread, and prompts the"
            " others; a stream alone has all; threads are not bound to cores",
            "elsewhere passes have prompts and decodes, on all cores, and the cost model chooses"
            " the prompts' share of their rows",
            "costs are the machine's measured table; its slope replaces the saturation points and"
            " the bandwidth contention term",
            "waiting time is counted in passes, so that the order does not depend on the clock",
        ),
    )
)
class Nexus(Schedule):
    """Runs prompts beside decodes: in passes of their own at the same time where the model can run
    two passes at once, else in the same passes, with as many rows as the cost model chooses.

    The share minimises prefill time while the time between tokens is within `beta` times its best.
    When more than `full` of the cache is in use, it minimises the time between tokens while prefill
    time is within `alpha` times its best.

    Args:
        row_budget: Maximum number of prompt rows per pass.
        short: Other requests of more rows count as prompts too.
        alpha: Slack on the prefill time, 1 or more.
        beta: Slack on the time between tokens, 1 or more.
        full: Used fraction of the cache above which decodes come first.
        steps: Number of shares to choose from.
        change: Minimum relative change of the share.
        ageing: Prompts are ordered by their remaining rows minus `ageing` per waited pass.
    """

    has_prompt_stream = True

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
                "nexus needs alpha and beta of 1 or more, steps between 1 and row_budget, and"
                " change and ageing of 0 or more"
            )
        self.row_budget, self.short = row_budget, short
        self.alpha, self.beta, self.full = alpha, beta, full
        self.shares = sorted({row_budget * (i + 1) // steps for i in range(steps)})
        self.change, self.ageing = change, ageing
        self._share = 0
        self._waited: dict[ScoreRequest, int] = {}

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        decodes: list[ScoreRequest] = []
        prompts: list[ScoreRequest] = []
        for request in waiting:
            is_whole = request.num_rows <= self.short and not begun(request)
            (decodes if is_whole and not is_prompt(request) else prompts).append(request)
        self._waited = {request: self._waited.get(request, -1) + 1 for request in prompts}
        for request in decodes:
            yield from whole(request)
        if prompts:
            rows = sum(request.num_rows for request in decodes)
            share = self._chosen(waiting, prompts, rows) if rows else self.row_budget
            prompts.sort(key=lambda s: s.num_rows - self.ageing * self._waited[s])
            yield from fit_spans(prompts, RowBudget(share, started=rows > 0))

    def _chosen(self, waiting: list[ScoreRequest], prompts: list[ScoreRequest], rows: int) -> int:
        kv_caches = [spans[-1].kv_cache for request in waiting for spans in request.groups]
        num_positions = sum(kv_cache.length for kv_cache in kv_caches)
        mean_length = num_positions // len(kv_caches)
        cost_model = waiting[0].sequence.cost_model
        decode_first = num_positions > self.full * kv_caches[0].pool.num_slots
        share = chosen_share(
            lambda count: cost_model.seconds(count, mean_length),
            rows,
            sum(request.num_rows for request in prompts),
            self.shares,
            decode_first=decode_first,
            slack=self.alpha if decode_first else self.beta,
        )
        if not self._share or abs(share - self._share) >= self.change * self._share:
            self._share = share
        return self._share
