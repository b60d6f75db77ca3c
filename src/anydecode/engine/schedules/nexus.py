"""Prefill and decode on one device, in two streams or with shares of each pass.

Shi et al., "Nexus: Proactive Intra-GPU Disaggregation of Prefill and Decode in LLM Serving",
arXiv:2507.06608.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import (
    RowBudget,
    Schedule,
    ScheduledSpan,
    ThreadCost,
    fit_spans,
    whole,
)
from anydecode.engine.schedules.chunked import begun
from anydecode.engine.schedules.pacing import is_prompt, mean_length
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import ScoreRequest


def chosen_share(
    inter_token: Mapping[int, float],
    prefill: Mapping[int, float],
    *,
    decode_first: bool,
    slack: float,
) -> int:
    """The prompts' share of the rows of a pass or of the threads, one of the keys of both mappings.

    Args:
        inter_token: The time between tokens in seconds, by share.
        prefill: The prefill time in seconds, by share.
        decode_first: Choose the smallest share whose prefill time is within `slack` times the best.
            Else the largest share whose time between tokens is within `slack` times the best.
        slack: 1 or more.
    """
    if decode_first:
        limit = slack * min(prefill.values())
        return min(share for share, seconds in prefill.items() if seconds <= limit)
    limit = slack * min(inter_token.values())
    return max(share for share, seconds in inter_token.items() if seconds <= limit)


def with_hysteresis(share: int, current: int, change: float) -> int:
    """The new share, or the current one if the new one differs by less than `change` times it."""
    return share if not current or abs(share - current) >= change * current else current


@register(
    Card(
        "nexus",
        "serving",
        paper="Shi et al. 2025, Nexus, arXiv:2507.06608",
        exactness="token-exact",
        use="LLM(schedule='nexus') or anydecode serve --schedule nexus",
        summary="Prompts and decodes run in two streams at the same time, and a cost model chooses"
        " the prompts' share of the threads, or of each pass; shortest prompts first.",
        deviations=(
            "prompts and decodes run in two streams with the native kernels on two threads or more,"
            " but for models with recurrences; a stream alone has all threads; threads are not"
            " bound to cores",
            "elsewhere passes have prompts and decodes, on all cores, and the cost model chooses"
            " the prompts' share of their rows",
            "costs are the machine's measured tables, those of streams by number of threads; they"
            " replace the saturation points, and bandwidth contention is left out",
            "the best of all shares is chosen, not by a greedy search from one end",
            "models that were not loaded from a file have no tables by number of threads; their"
            " decodes have one thread",
            "waiting time is counted in passes, so that the order does not depend on the clock",
        ),
    )
)
class Nexus(Schedule):
    """Runs prompts beside decodes: in passes of their own at the same time where the model can run
    two passes at once, else in the same passes. The cost model chooses the prompts' share of the
    threads, or of the rows of each pass.

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
        self._share = self._prompt_threads = 0
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

    def decode_threads(
        self,
        decodes: Seq[ScoreRequest],
        prompts: Seq[ScoreRequest],
        threads: int,
        cost: ThreadCost | None,
    ) -> int:
        if threads == 2 or cost is None or not (decodes and prompts):
            return 1
        rows, length = sum(request.num_rows for request in decodes), mean_length(decodes)
        num_prompt_rows = min(self.row_budget, sum(request.num_rows for request in prompts))
        prompt_length, shares = mean_length(prompts), range(1, threads)
        share = self._within_slack(
            [*decodes, *prompts],
            {share: cost(rows, length, threads - share) for share in shares},
            {share: cost(num_prompt_rows, prompt_length, share) for share in shares},
        )
        self._prompt_threads = with_hysteresis(share, self._prompt_threads, self.change)
        return threads - self._prompt_threads

    def _chosen(self, waiting: list[ScoreRequest], prompts: list[ScoreRequest], rows: int) -> int:
        cost_model, length = waiting[0].sequence.cost_model, mean_length(waiting)
        num_prompt_rows = sum(request.num_rows for request in prompts)
        inter_token = {share: cost_model.seconds(rows + share, length) for share in self.shares}
        prefill = {
            share: -(-num_prompt_rows // share) * seconds for share, seconds in inter_token.items()
        }
        share = self._within_slack(waiting, inter_token, prefill)
        self._share = with_hysteresis(share, self._share, self.change)
        return self._share

    def _within_slack(
        self,
        waiting: Seq[ScoreRequest],
        inter_token: Mapping[int, float],
        prefill: Mapping[int, float],
    ) -> int:
        """The chosen share, by how much of the cache the requests `waiting` use."""
        kv_caches = [spans[-1].kv_cache for request in waiting for spans in request.groups]
        num_positions = sum(kv_cache.length for kv_cache in kv_caches)
        decode_first = num_positions > self.full * kv_caches[0].pool.num_slots
        slack = self.alpha if decode_first else self.beta
        return chosen_share(inter_token, prefill, decode_first=decode_first, slack=slack)
