"""Goodput: how many drafted rows of each request a pass should have.

The objective is that of Liu et al., SmartSpec, arXiv:2406.14066: the expected tokens of the pass,
of all requests together, divided by its cost.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import merge


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
