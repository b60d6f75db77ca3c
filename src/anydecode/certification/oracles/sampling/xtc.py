"""Oracle of xtc (Exclude Top Choices, p-e-w, 2024): the mixture of both outcomes of the coin; and
rows left without a viable token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text
from anydecode.certification.oracles.sampling.one_row import (
    by_hand,
    log_probabilities,
    sampling_distribution,
)
from anydecode.certification.oracles.sampling.token_sets import renormalized, tempered
from anydecode.certification.samplers import VOCABULARY, OracleContext, oracle, softmax


@oracle("xtc", {"probability": 0.4, "threshold": 0.12}, {"probability": 1.0, "threshold": 0.2}, {})
def xtc_probabilities(
    context: OracleContext, tokens: Text, probability: float = 0.5, threshold: float = 0.1
) -> np.ndarray:
    """The mixture of both outcomes of the coin."""
    probabilities = tempered(context, tokens)
    top = [t for t in range(VOCABULARY) if probabilities[t] >= threshold]
    if len(top) < 2:
        return probabilities
    spared = min(top, key=lambda t: (probabilities[t], -t))
    without = renormalized(
        probabilities, [t for t in range(VOCABULARY) if t not in top or t == spared]
    )
    return probability * without + (1 - probability) * probabilities


@oracle_test("xtc")
def xtc() -> Iterator[Check]:
    """(0.4, 0.3, 0.2, 0.1) with threshold 0.15: three are above it, and the third stays."""
    row = log_probabilities(0.4, 0.3, 0.2, 0.1)
    always = sampling_distribution(row, xtc_probability=1.0, xtc_threshold=0.15)
    yield by_hand("all but the least probable candidate are dropped", always, 0, 0, 2 / 3, 1 / 3)
    half = sampling_distribution(row, xtc_probability=0.5, xtc_threshold=0.15)
    yield by_hand("dropped with probability 0.5", half, 0.2, 0.15, 0.1 + 1 / 3, 0.05 + 1 / 6)
    alone = sampling_distribution(row, xtc_probability=1.0, xtc_threshold=0.35)
    yield by_hand("a single candidate stays", alone, 0.4, 0.3, 0.2, 0.1)


@measure("xtc", "rows left without a viable token", samples=100, margin=0.0)
def xtc_claim(samples: int) -> float:
    """Probable tokens are dropped, but one above the threshold always stays."""
    lost, cut = 0, 0
    for seed in range(samples):
        p = softmax(np.random.default_rng(seed).normal(0, 1.5, 30))
        is_kept = sampling_distribution(np.log(p), xtc_probability=1.0) > 0
        cut += not is_kept.all()
        lost += not is_kept[p >= 0.1].any() and bool((p >= 0.1).any())
    return lost / samples if cut else math.inf
