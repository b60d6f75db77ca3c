"""What masks are ranked by: the larger, the sooner a position is filled."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.errors import InvalidRequestError


class Ranking(ABC):
    """One number per position. Thresholds hold against these numbers, too."""

    @abstractmethod
    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        """float64 `[len(positions)]`."""


class Confidence(Ranking):
    """The un-noised probability of the token that would be written (LLaDA, Dream maskgit_plus)."""

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        return predictions.confidence(positions)


class Margin(Ranking):
    """The largest probability less the second (Dream topk_margin)."""

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        return predictions.margins(positions)


class Entropy(Ranking):
    """Least entropy first: its negative, in nats (Dream entropy)."""

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        return -predictions.entropies(positions)


class Random(Ranking):
    """Uniform numbers that belong to the place and the step (LLaDA random, Dream origin)."""

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        noise = predictions.sequence.noise.with_purpose("unmask")
        return np.array([noise.coin(int(position), predictions.step) for position in positions])


class Leftmost(Ranking):
    """From left to right."""

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        return -positions.astype(np.float64)


RANKINGS: dict[str, type[Ranking]] = {
    "confidence": Confidence,
    "margin": Margin,
    "entropy": Entropy,
    "random": Random,
    "leftmost": Leftmost,
}


def ranking(name: str) -> Ranking:
    """The ranking a user named. Raises `InvalidRequestError`."""
    if name not in RANKINGS:
        raise InvalidRequestError(
            f"masks are ranked by {', '.join(RANKINGS)}; {name!r} is none of them"
        )
    return RANKINGS[name]()


def best_first(ranks: np.ndarray) -> np.ndarray:
    """Indices by falling rank; among equals the leftmost position first."""
    order: np.ndarray = np.argsort(-ranks, kind="stable")
    return order
