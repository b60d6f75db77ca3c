"""What can be reached when tokens are decoded independently of each other (Kang et al.,
ParallelBench, arXiv:2510.04767): the total correlation of what one pass commits is lost."""

from __future__ import annotations

import math


def shuffle_correlation(items: int) -> float:
    """Nats by which `items` slots, each uniform over the items, differ from a uniform permutation:
    n ln n - ln n!, the least divergence of any decoding in one pass."""
    return items * math.log(items) - math.lgamma(items + 1)


def shuffle_success(items: int) -> float:
    """The chance that one pass, each slot drawn alone, gives a permutation: n! / n**n."""
    return math.exp(-shuffle_correlation(items))


def replacement_success(items: int, greedy: bool = False) -> float:
    """The chance that one pass replaces exactly one of `items`: every slot is drawn alone and takes
    the new word one time in n, so (1 - 1/n)**(n - 1); greedily every slot keeps its item."""
    if greedy:
        return 0.0 if items > 2 else 1.0
    return (1 - 1 / items) ** (items - 1)
