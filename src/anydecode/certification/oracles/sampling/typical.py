"""Oracle of typical (Locally Typical Sampling, arXiv:2202.00666): tokens by the distance of their
surprisal from the entropy; and how close the sampled ones are."""

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
    sampling_distribution,
)
from anydecode.certification.oracles.sampling.token_sets import renormalized, tempered, up_to
from anydecode.certification.samplers import VOCABULARY, OracleContext, oracle, softmax


@oracle("typical", {"p": 0.5}, {"p": 0.9}, {})
def typical_probabilities(context: OracleContext, tokens: Text, p: float = 0.95) -> np.ndarray:
    """Tokens by the distance of their surprisal from the entropy, until they hold the mass."""
    probabilities = tempered(context, tokens)
    entropy = -sum(q * math.log(q) for q in probabilities)
    order = sorted(range(VOCABULARY), key=lambda t: (abs(-math.log(probabilities[t]) - entropy), t))
    return renormalized(probabilities, up_to(order, probabilities, p))


@oracle_test("typical")
def typical() -> Iterator[Check]:
    """The entropy of (0.6, 0.2, 0.1, 0.1) is 1.089 nats; surprisals are 0.511, 1.609, 2.303,
    2.303."""
    row = log_probabilities(0.6, 0.2, 0.1, 0.1)
    yield by_hand(
        "the second token is the most typical",
        sampling_distribution(row, typical_p=0.15),
        0,
        1,
        0,
        0,
    )
    yield by_hand(
        "the first token is next", sampling_distribution(row, typical_p=0.7), 0.75, 0.25, 0, 0
    )


@measure(
    "typical",
    "distance of surprisal from entropy, relative to plain sampling",
    samples=80,
    margin=0.7,
)
def typical_claim(samples: int) -> float:
    """Sampled tokens carry about as much information as expected."""
    return typicality(samples, typical_p=0.5)


def typicality(samples: int, **options: Any) -> float:
    """The mean |surprisal - entropy| under a rule, divided by that without it."""
    with_rule, without = 0.0, 0.0
    for seed in range(samples):
        row = np.random.default_rng(seed).normal(0, 1.5, 60)
        p = softmax(row)
        off = np.abs(-np.log(p) + (p * np.log(p)).sum())
        with_rule += float((sampling_distribution(row, **options) * off).sum())
        without += float((p * off).sum())
    return with_rule / without
