"""Diffusion under causal attention: what is written moves to the front of the window, at its true
positions, so that every mask sees it (Liu et al., "WeDLM: Reconciling Diffusion Language Models
with Standard Causal Attention for Fast Inference", arXiv:2512.22737)."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import SlidingWindow
from anydecode.decoders.diffusion.caches import CausalCache
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Ranking
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.errors import InvalidRequestError


class DistancePenalisedEntropy(Ranking):
    """Least entropy first, each position counted from the first mask making it `penalty` worse."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        distance = positions - canvas.frontier
        ranks: np.ndarray = -(predictions.entropies(positions) + self.penalty * distance)
        return ranks


class StrictThreshold(ThresholdUnmasking):
    """Every mask whose adjusted entropy is below the bound, not at it."""

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        chosen: np.ndarray = ranks > self.least
        return chosen


@register(
    Card(
        "wedlm",
        "diffusion",
        paper="WeDLM (arXiv:2512.22737)",
        exactness="lossy",
        summary="A sliding window of masks under causal attention, over an exact cache.",
        needs=("causal diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming"),
        deviations=(
            "works on any causal model with a mask token; the paper's figures need its training",
            "entropies are those before temperature and truncation, as in the released code",
        ),
    )
)
def wedlm(
    window: int = 16, entropy: float = 0.4, penalty: float = 0.02, mask: int | None = None
) -> Denoiser:
    """A `window` of positions behind the text; commits masks of an entropy below `entropy` nats,
    plus `penalty` per position from the first mask."""
    if penalty < 0:
        raise InvalidRequestError("the penalty on distance cannot be negative")
    return Denoiser(
        SlidingWindow(window),
        DistancePenalisedEntropy(penalty),
        StrictThreshold(-entropy),
        CausalCache(),
        mask=mask,
    )
