"""Masks near a sure one need less certainty (LocalLeap, "Accelerating Diffusion LLM Inference via
Local Determinism Propagation", arXiv:2510.07081)."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import cache as cache_named
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.unmasking import UnmaskPolicy
from anydecode.errors import InvalidRequestError


class NearAnchors(UnmaskPolicy):
    """Masks ranked at least `threshold` (anchors), and those within `radius` of one that are
    ranked at least `relaxed`."""

    def __init__(self, threshold: float, relaxed: float, radius: int) -> None:
        if radius < 0:
            raise InvalidRequestError("the radius cannot be negative")
        self.threshold = threshold
        self.relaxed = relaxed
        self.radius = radius

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        sure: np.ndarray = ranks >= self.threshold
        distance = np.abs(positions[:, None] - positions[sure][None, :])
        near = (distance <= self.radius).any(axis=1)
        chosen: np.ndarray = sure | (near & (ranks >= self.relaxed))
        return chosen


@register(
    Card(
        "localleap",
        "diffusion",
        paper="LocalLeap (arXiv:2510.07081)",
        exactness="lossy",
        summary="Around a mask the model is sure of, less certainty is enough.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=("anchors are masks of this pass only, as in the released code",),
    )
)
def localleap(
    threshold: float = 0.9,
    relaxed: float = 0.75,
    radius: int = 4,
    block: int | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Commits confidences of `threshold`, or of `relaxed` within `radius` positions of one."""
    unmask = NearAnchors(threshold, relaxed, radius)
    return Denoiser(FixedBlocks(block), Confidence(), unmask, cache_named(cache), mask=mask)
