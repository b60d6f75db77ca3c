"""Oracle of min-p (arXiv:2407.01082): tokens at least p times as probable as the most probable one;
and the mass on wrong tokens at a high temperature."""

from __future__ import annotations

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
from anydecode.certification.samplers import VOCABULARY, OracleContext, oracle


@oracle("min-p", {"p": 0.15}, {"p": 0.6}, {})
def min_p_probabilities(context: OracleContext, tokens: Text, p: float = 0.05) -> np.ndarray:
    """Every token at least p times as probable as the most probable one."""
    probabilities = tempered(context, tokens)
    return renormalized(
        probabilities, [t for t in range(VOCABULARY) if probabilities[t] >= p * max(probabilities)]
    )


def wrong_mass(samples: int, **options: Any) -> float:
    """The mean probability of tokens that have none in the true distribution."""
    rows = [noisy(seed) for seed in range(samples)]
    return float(
        np.mean([sampling_distribution(row, **options)[truth == 0].sum() for truth, row in rows])
    )


@oracle_test("min-p")
def min_p() -> Iterator[Check]:
    """With p = 0.4 the bound is 0.4 * 0.5 = 0.2."""
    row = log_probabilities(0.5, 0.25, 0.15, 0.1)
    yield by_hand(
        "keeps tokens above 0.2", sampling_distribution(row, min_p=0.4), 2 / 3, 1 / 3, 0, 0
    )
    flat = sampling_distribution(log_probabilities(0.26, 0.25, 0.25, 0.24), min_p=0.4)
    yield by_hand("keeps all tokens of a flat row", flat, 0.26, 0.25, 0.25, 0.24)
    hot = wrong_mass(20, temperature=2.0, top_p=0.9)
    yield Check("top-p keeps the tail at a high temperature", hot > 0.3, f"{hot:.2f} of the mass")


@measure("min-p", "mass on wrong tokens at temperature 2", samples=60, margin=0.02)
def min_p_claim(samples: int) -> float:
    """Coherence at a high temperature: the bound scales with the top token's probability."""
    return wrong_mass(samples, temperature=2.0, min_p=0.2)
