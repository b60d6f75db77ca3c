"""Goodput: how many drafted rows of each request a pass should have.

The objective is that of Liu et al., SmartSpec, arXiv:2406.14066: the expected tokens of the pass,
of all requests together, divided by its cost. It counts all tokens alike; where no request waits
until another ends, `token_weights` says what each saves.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import merge
from math import exp

import numpy as np


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


def token_weights(
    remaining: Seq[int], pass_seconds: float, all_seconds: float, end_rate: float
) -> list[float]:
    """What a token of each of several running texts saves, relative to the mean.

    A text that ends earlier by one token leaves its row out of one pass. If it is the last one, it
    saves that pass. So the weight follows from the probability that a text outlasts the others. Of
    texts that run to their limits, one outlasts another that has as many tokens left with a
    probability of a half, which changes with the difference over twice the square root of what is
    left, since drafts may still change the lead. Texts that end before their limits outlast each
    other with equal chances.

    Args:
        remaining: Tokens left until the limit of each text, 1 or more; of two texts or more.
        pass_seconds: Seconds of a pass over one row.
        all_seconds: Seconds of a pass over one row of each text.
        end_rate: The rate at which texts end before their limits, per token.
    """
    left, num = np.array(remaining, np.float64), len(remaining)
    longest = max(1.0, float(left.max()))
    lead = (left[:, None] - left) / (2 * longest**0.5)
    outlasting = np.minimum(np.maximum(0.5 + lead, 0.0), 1.0)  # a half of itself
    share = exp(-end_rate * longest)  # of the texts that reach their limits
    last = share * (2 * outlasting.prod(1)) + (1 - share) / num
    row_seconds = (all_seconds - pass_seconds) / (num - 1)
    saved = last * pass_seconds + (1 - last) * row_seconds
    weights: list[float] = (saved * num / all_seconds).tolist()
    return weights
