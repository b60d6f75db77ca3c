"""Confidence-adaptive decoding with a cap and a hold on the end of text (Liang et al., "CD4LM:
Consistency Distillation and aDaptive Decoding for Diffusion Language Models", arXiv:2601.02236).
The distillation is `anydecode train diffusion --method cd4lm`."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import cache as cache_named
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.errors import InvalidRequestError


class HeldEnd(Confidence):
    """Confidence, but an end of text ranks last until `share` of the canvas is filled."""

    def __init__(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise InvalidRequestError("the share that must be filled first is between 0 and 1")
        self.share = share

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        ranks = super().rank(canvas, predictions, positions)
        done = np.count_nonzero(canvas.committed >= 0)
        if done < self.share * (done + len(canvas.masks)):
            ends = [
                predictions.sequence.stops_at(predictions.token(position)) for position in positions
            ]
            ranks[ends] = -np.inf
        return ranks


@register(
    Card(
        "cd4lm",
        "diffusion",
        paper="CD4LM (arXiv:2601.02236)",
        exactness="lossy",
        summary="Up to four sure tokens a pass, and no end of text before half the canvas is full.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "where nothing but ends of text is left to choose, the leftmost is written",
            "runs on any diffusion model; the paper's figures need its distillation",
        ),
    )
)
def cd4lm(
    threshold: float = 0.95,
    most: int = 4,
    hold: float = 0.5,
    block: int | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Commits confidences of `threshold`, `most` at a time; `hold` is the share of the canvas that
    is filled before an end of text may be."""
    if most < 1:
        raise InvalidRequestError("at least one token must be written per pass")
    unmask = ThresholdUnmasking(threshold, most)
    return Denoiser(FixedBlocks(block), HeldEnd(hold), unmask, cache_named(cache), mask=mask)
