"""Oracle of top-n-sigma (arXiv:2411.07641): a bound on logits in standard deviations; and kept sets
that do not change with the temperature."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text
from anydecode.certification.oracles.sampling.one_row import by_hand, sampling_distribution
from anydecode.certification.oracles.sampling.token_sets import renormalized, tempered
from anydecode.certification.samplers import VOCABULARY, OracleContext, oracle


@oracle("top-n-sigma", {"n": 1.6}, {})
def top_n_sigma_probabilities(context: OracleContext, tokens: Text, n: float = 1.0) -> np.ndarray:
    """The bound is on logits, so the temperature has no effect on it."""
    logits = context.logits(tokens)
    mean = sum(logits) / VOCABULARY
    deviation = math.sqrt(sum((z - mean) ** 2 for z in logits) / VOCABULARY)
    kept = [t for t in range(VOCABULARY) if logits[t] >= max(logits) - n * deviation]
    return renormalized(tempered(context, tokens), kept)


@oracle_test("top-n-sigma")
def top_n_sigma() -> Iterator[Check]:
    """Logits 0, 1, 2, 3, 10: mean 3.2, standard deviation 3.544."""
    row = np.array([0.0, 1, 2, 3, 10])
    yield by_hand(
        "1.9 deviations keep one token", sampling_distribution(row, top_n_sigma=1.9), 0, 0, 0, 0, 1
    )
    tokens = np.flatnonzero(sampling_distribution(row, top_n_sigma=2.0, temperature=3.0))
    yield Check("2 deviations keep two, at any temperature", tokens.tolist() == [3, 4], str(tokens))
    moved = changed_sets(40, min_p=0.05)
    yield Check(
        "min-p's kept set changes with the temperature", moved > 0.5, f"in {moved:.2f} of rows"
    )


@measure("top-n-sigma", "kept sets that change with the temperature", samples=80, margin=0.0)
def top_n_sigma_claim(samples: int) -> float:
    """The same tokens are kept at every temperature."""
    return changed_sets(samples, top_n_sigma=1.0)


def changed_sets(samples: int, **options: Any) -> float:
    """The share of rows whose kept set differs between temperatures."""
    changed = 0
    for seed in range(samples):
        row = np.random.default_rng(seed).normal(0, 1.5, 200)
        sets = {
            tuple(np.flatnonzero(sampling_distribution(row, temperature=temperature, **options)))
            for temperature in (0.7, 1.0, 2.0, 5.0)
        }
        changed += len(sets) > 1
    return changed / samples
