"""The choice of optional rows: of the drafted rows of all requests in a pass, those that save time.

The objective is the goodput of all requests together (Liu et al., SmartSpec, arXiv:2406.14066): the
expected tokens of the pass divided by its cost.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import merge

from anydecode.engine.schedule import ScheduledSpan
from anydecode.scoring.score import ScoreRequest

#: Seconds of a pass, by its number of rows and the positions that each attends to.
PassCost = Callable[[int, int], float]


def without_useless_rows(scheduled: list[ScheduledSpan], cost: PassCost) -> list[ScheduledSpan]:
    """Take from a pass the optional rows that save no time.

    Args:
        scheduled: The pass. Requests that it runs whole lose optional rows.
        cost: The cost of a pass.

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
        lambda rows: cost(fixed + rows, context),
    )
    for request, count in zip(choices, kept, strict=True):
        request.keep_optional(count)
    is_left = {span for request in counts for group in request.groups for span in group}
    return [
        (request, span, min(count, span.remaining))
        for request, span, count in scheduled
        if span in is_left
    ]


def useful_counts(
    probabilities: Seq[Seq[float]], num_tokens: int, cost: Callable[[int], float]
) -> list[int]:
    """How many optional rows of each request to run for the most expected tokens per second.

    Args:
        probabilities: Of each request's optional rows to be useful, falling.
        num_tokens: Tokens that the pass yields without them.
        cost: Seconds of the pass with a number of optional rows.

    Returns:
        One count per request.
    """
    ranked = merge(
        *(
            [(-probability, owner) for probability in rows]
            for owner, rows in enumerate(probabilities)
        )
    )
    counts, best = [0] * len(probabilities), [0] * len(probabilities)
    tokens = float(num_tokens)
    best_rate = tokens / cost(0)
    for number, (negative, owner) in enumerate(ranked, 1):
        counts[owner] += 1
        tokens -= negative
        rate = tokens / cost(number)
        if rate > best_rate:
            best, best_rate = list(counts), rate
    return best
