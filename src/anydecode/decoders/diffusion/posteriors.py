"""The reverse step of discrete diffusion whose noise is masks, random tokens, or both.

At time t a position holds its token with probability `share` (alpha), else noise. Given what it
holds and the model's distribution of its token, a step samples what it holds at an earlier time s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.scoring.sequence import Sequence


@dataclass(frozen=True)
class NoiseLevel:
    """The marginal of a position at one time.

    Attributes:
        share: The probability that it holds its token.
        mask: The probability that it holds the mask token as noise.
        other: The probability that it holds one given token as noise.
    """

    share: float
    mask: float
    other: float

    def vector(self, size: int, mask: int) -> np.ndarray:
        """The probabilities of noise, float64 `[size]`; `mask` is -1 if there is no mask token."""
        noise = np.full(size, self.other)
        if mask >= 0:
            noise[mask] = self.mask
        return noise


def posterior(
    held: int, clean: np.ndarray, now: NoiseLevel, later: NoiseLevel, mask: int
) -> np.ndarray:
    """The distribution of what a position holds at time s, float64 `[vocab_size]`.

    This is q(z_s | z_t) = q(z_t | z_s) q(z_s | x) / q(z_t | x), where x is distributed as `clean`.

    Args:
        held: What the position holds at time t.
        clean: The model's distribution of its token, float64 `[vocab_size]`.
        now: The marginal at time t.
        later: The marginal at time s, with less noise.
        mask: The mask token, or -1.
    """
    kept = now.share / later.share
    noise = now.vector(len(clean), mask) - kept * later.vector(len(clean), mask)
    likelihood = np.full(len(clean), max(0.0, noise[held]))
    likelihood[held] += kept
    weights = likelihood * (later.share * clean + later.vector(len(clean), mask))
    total = weights.sum()
    if not total:  # no noise can have put this token here: it stays
        weights[held] = total = 1.0
    result: np.ndarray = weights / total
    return result


def clean_distribution(predictions: Predictions, position: int) -> np.ndarray:
    """The sampler's distribution of the token at `position`, float64 `[vocab_size]`; one token at
    temperature 0."""
    logits = predictions.logits(position)
    return predictions.sampler.distribution(logits).dense(len(logits))


def draw(sequence: Sequence, distribution: np.ndarray, position: int, step: int) -> int:
    """A token of `distribution`, sampled with the noise of the position and step."""
    support = np.flatnonzero(distribution)
    noise = sequence.noise.gumbel(support, position, step)
    return int(support[(np.log(distribution[support]) + noise).argmax()])
