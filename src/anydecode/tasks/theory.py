"""Theoretical success rates of decoding tokens independently of each other (Kang et al.,
ParallelBench, arXiv:2510.04767): the total correlation of the tokens of one pass is lost."""

from __future__ import annotations

import math


def shuffle_correlation(items: int) -> float:
    """Divergence in nats of `items` independent slots, each uniform over the items, from a uniform
    permutation: n ln n - ln n!, the minimum over all one-pass decodings."""
    return items * math.log(items) - math.lgamma(items + 1)


def shuffle_success(items: int) -> float:
    """Probability that one pass, with slots sampled independently, gives a permutation: n! /
    n**n."""
    return math.exp(-shuffle_correlation(items))


def replacement_success(items: int, greedy: bool = False) -> float:
    """Probability that one pass replaces exactly one of `items`. Each slot independently takes the
    new word with probability 1/n, so it is (1 - 1/n)**(n - 1); greedily, each of n > 2 slots keeps
    its item."""
    if greedy:
        return 0.0 if items > 2 else 1.0
    return (1 - 1 / items) ** (items - 1)
