"""WeDLM (Liu et al., "WeDLM: Reconciling Diffusion Language Models with Standard Causal Attention
for Fast Inference", arXiv:2512.22737).

A causal model denoises a sliding window. In each pass the unmasked tokens of the window come before
its masks, with their true positions, so that every mask sees them.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import SlidingWindow
from anydecode.decoders.diffusion.caches import CausalCache
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Ranking
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.errors import InvalidRequestError


class DistancePenalisedEntropy(Ranking):
    """Lowest entropy first, plus `penalty` nats for each position from the first mask on."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        distance = positions - canvas.frontier
        ranks: np.ndarray = -(predictions.entropies(positions) + self.penalty * distance)
        return ranks


class StrictThreshold(ThresholdUnmasking):
    """Unmasks every mask with a rank above the threshold, excluding the threshold itself."""

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        chosen: np.ndarray = ranks > self.threshold
        return chosen


@register(
    Card(
        "wedlm",
        "diffusion",
        paper="WeDLM (arXiv:2512.22737)",
        exactness="lossy",
        summary="Denoises a sliding window with a causal model and an exact cache.",
        needs=("causal diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming"),
        deviations=(
            "runs on any causal model with a mask token; the paper's results need its training",
            "entropies are taken before temperature and truncation, as in the released code",
        ),
        remote={"window": Range(1, 256), "entropy": Range(0, 100), "penalty": Range(0, 10)},
    )
)
def wedlm(
    window: int = 16, entropy: float = 0.4, penalty: float = 0.02, mask: int | None = None
) -> Denoiser:
    """Denoises a sliding window with a causal model.

    Args:
        window: How many positions from the first mask on a pass predicts.
        entropy: Masks are unmasked if their entropy plus the penalty is below this, in nats.
        penalty: The penalty in nats for each position after the first mask, at least 0.
        mask: The mask token (default: the tokenizer's).
    """
    if penalty < 0:
        raise InvalidRequestError(f"penalty must be at least 0, not {penalty}")
    return Denoiser(
        SlidingWindow(window),
        DistancePenalisedEntropy(penalty),
        StrictThreshold(-entropy),
        CausalCache(),
        mask=mask,
    )
