"""Oracle of eta (Truncation Sampling as Language Model Desmoothing, arXiv:2210.15191): the bound
min(epsilon, sqrt(epsilon) exp(-entropy)); and the distance from a distribution before smoothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text
from anydecode.certification.oracles.sampling.one_row import (
    by_hand,
    log_probabilities,
    noisy,
    sampling_distribution,
)
from anydecode.certification.oracles.sampling.token_sets import renormalized, tempered
from anydecode.certification.samplers import VOCABULARY, OracleContext, oracle, softmax


@oracle("eta", {"epsilon": 0.09}, {"epsilon": 0.3}, {})
def eta_probabilities(context: OracleContext, tokens: Text, epsilon: float = 6e-4) -> np.ndarray:
    """The bound is epsilon, or lower where the entropy is high; the most probable token stays."""
    probabilities = tempered(context, tokens)
    entropy = -sum(q * math.log(q) for q in probabilities)
    bound = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy), max(probabilities))
    return renormalized(probabilities, [t for t in range(VOCABULARY) if probabilities[t] >= bound])


@oracle_test("eta")
def eta() -> Iterator[Check]:
    """Bounds min(e, sqrt(e) exp(-H)): for (0.7, 0.2, 0.08, 0.02) H = 0.852, exp(-H) = 0.427."""
    row = log_probabilities(0.7, 0.2, 0.08, 0.02)
    actual = sampling_distribution(row, eta=0.04)
    yield by_hand("eta 0.04 is the bound itself", actual, 0.7 / 0.98, 0.2 / 0.98, 0.08 / 0.98, 0)
    actual = sampling_distribution(row, eta=0.36)
    yield by_hand("eta 0.36 gives the bound 0.256", actual, 1, 0, 0, 0)
    flat = np.linspace(0, 0.2, 100)
    yield Check("a flat row is kept whole", bool((sampling_distribution(flat, eta=0.05) > 0).all()))
    yield Check(
        "epsilon alone would cut the flat row",
        bool((sampling_distribution(flat, epsilon=0.05) > 0).sum() == 1),
    )
    for name, options in (("top-p", {"top_p": 0.9}), ("epsilon", {"epsilon": 4e-3})):
        off = desmoothing(10, **options)
        yield Check(f"{name} is further from the true distribution", off > 0.7, f"{off:.2f}")


@measure(
    "eta",
    "distance from the true distribution, relative to the smoothed model",
    samples=30,
    margin=0.6,
)
def eta_claim(samples: int) -> float:
    """Truncation undoes smoothing, in flat rows and in peaked ones."""
    return desmoothing(samples, eta=4e-4)


def desmoothing(samples: int, **options: Any) -> float:
    """Total variation from the true distribution under a rule, divided by that of the model
    itself."""
    ratios = []
    for seed in range(samples):
        for flat in (False, True):
            truth, row = noisy(seed, flat)
            off = np.abs(sampling_distribution(row, **options) - truth).sum()
            ratios.append(off / np.abs(softmax(row) - truth).sum())
    return float(np.mean(ratios))
