"""Rankings: the order in which masks are unmasked; the largest number comes first."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from anydecode.catalogue import Words
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.errors import InvalidRequestError


class Ranking(ABC):
    """Gives each position a number. Thresholds of unmask policies are compared to it, too."""

    @abstractmethod
    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        """The rank of each of `positions`, float64 `[len(positions)]`."""


class Confidence(Ranking):
    """The probability of the sampled token, without noise (LLaDA, Dream's maskgit_plus)."""

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        return predictions.confidence(positions)


class Margin(Ranking):
    """The largest probability minus the second largest (Dream's topk_margin)."""

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        return predictions.margins(positions)


class Entropy(Ranking):
    """The negative entropy in nats: the lowest entropy comes first (Dream's entropy)."""

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        return -predictions.entropies(positions)


class Random(Ranking):
    """Uniform random numbers by position and step (LLaDA's random, Dream's origin)."""

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        noise = predictions.sequence.noise.with_purpose("unmask")
        return np.array([noise.coin(int(position), predictions.step) for position in positions])


class Leftmost(Ranking):
    """The negative position: from left to right."""

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        return -positions.astype(np.float64)


RANKINGS: dict[str, type[Ranking]] = {
    "confidence": Confidence,
    "margin": Margin,
    "entropy": Entropy,
    "random": Random,
    "leftmost": Leftmost,
}
RANKING_WORDS = Words(tuple(RANKINGS))


def ranking(name: str) -> Ranking:
    """The ranking of a given name.

    Raises:
        InvalidRequestError: There is no such ranking.
    """
    if name not in RANKINGS:
        raise InvalidRequestError(
            f"the ranking of masks {name!r} is unknown; it must be one of {', '.join(RANKINGS)}"
        )
    return RANKINGS[name]()


def best_first(ranks: np.ndarray) -> np.ndarray:
    """Indices in descending order of rank; of equal ranks the leftmost position comes first."""
    order: np.ndarray = np.argsort(-ranks, kind="stable")
    return order
