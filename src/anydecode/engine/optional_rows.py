"""The choice of optional rows: of the drafted rows of all requests in a pass, those that save
time."""

from __future__ import annotations

from anydecode.engine.schedule import ScheduledSpan
from anydecode.scoring.cost import CostModel
from anydecode.scoring.goodput import useful_counts
from anydecode.scoring.score import ScoreRequest


def without_useless_rows(scheduled: list[ScheduledSpan], costs: CostModel) -> list[ScheduledSpan]:
    """Take from a pass the optional rows that save no time.

    Args:
        scheduled: The pass. Requests that it runs whole lose optional rows.
        costs: The costs of passes.

    Returns:
        The pass without these rows.
    """
    if not any(len(request.optional) for request, _, _ in scheduled):
        return scheduled
    counts: dict[ScoreRequest, int] = {}
    for request, _, count in scheduled:
        counts[request] = counts.get(request, 0) + count
    choices = [r for r, n in counts.items() if len(r.optional) and r.is_new and n == r.num_rows]
    if not choices:
        return scheduled
    positions = sum(span.kv_cache.length * count for _, span, count in scheduled)
    num_rows = sum(counts.values())
    num_tokens = sum(n == request.num_rows for request, n in counts.items())
    fixed = num_rows - sum(len(request.optional) for request in choices)
    context = positions // num_rows
    kept = useful_counts(
        [request.optional for request in choices],
        num_tokens,
        lambda rows: costs.seconds(fixed + rows, context),
    )
    for request, count in zip(choices, kept, strict=True):
        request.keep_optional(count)
    is_left = {span for request in counts for group in request.groups for span in group}
    return [
        (request, span, min(count, span.remaining))
        for request, span, count in scheduled
        if span in is_left
    ]
