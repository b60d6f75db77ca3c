"""The distribution from which the engine samples one row of logits, by hand and against a smoothed
true distribution."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.certification.checks import Check
from anydecode.sampling.params import SamplingParams


def log_probabilities(*probabilities: float) -> np.ndarray:
    """float32 logits of these probabilities."""
    row: np.ndarray = np.log(np.array(probabilities)).astype(np.float32)
    return row


def sampling_distribution(
    row: np.ndarray, prompt: tuple[int, ...] = (), **options: Any
) -> np.ndarray:
    """The probabilities `[vocab_size]` from which a request with these options samples."""
    sampler = SamplingParams(**options).sampler(prompt, len(row))
    return sampler.distribution(row.astype(np.float32)).dense(len(row))


def by_hand(name: str, actual: np.ndarray, *expected: float) -> Check:
    """Whether the probabilities equal those computed by hand."""
    return Check(name, bool(np.abs(actual - np.array(expected)).max() < 1e-6), str(actual.round(4)))


def noisy(seed: int, flat: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """A true distribution over some of 600 tokens, and the logits of a smoothed version: a tenth of
    the mass is spread over all tokens. `flat`: 400 tokens have mass instead of 6."""
    rng = np.random.default_rng(seed)
    truth = np.zeros(600)
    support = rng.permutation(600)[: 400 if flat else 6]
    truth[support] = rng.dirichlet(np.full(len(support), 5.0))
    return truth, np.log(0.9 * truth + 0.1 / 600)
