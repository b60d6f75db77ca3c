"""LocalLeap ("Accelerating Diffusion LLM Inference via Local Determinism Propagation",
arXiv:2510.07081).

Masks above a confidence threshold are anchors and are unmasked. Masks close to an anchor need only
a lower confidence.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import BLOCKWISE_WORDS, blocks_and_cache
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.unmasking import UnmaskPolicy
from anydecode.errors import InvalidRequestError


class AnchorUnmasking(UnmaskPolicy):
    """Unmasks masks with a rank of at least `threshold` (anchors), and those within `radius`
    positions of an anchor with a rank of at least `relaxed`."""

    def __init__(self, threshold: float, relaxed: float, radius: int) -> None:
        if radius < 0:
            raise InvalidRequestError(f"radius must be at least 0, not {radius}")
        self.threshold = threshold
        self.relaxed = relaxed
        self.radius = radius

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        is_anchor: np.ndarray = ranks >= self.threshold
        distance = np.abs(positions[:, None] - positions[is_anchor][None, :])
        is_near = (distance <= self.radius).any(axis=1)
        chosen: np.ndarray = is_anchor | (is_near & (ranks >= self.relaxed))
        return chosen


@register(
    Card(
        "localleap",
        "diffusion",
        paper="LocalLeap (arXiv:2510.07081)",
        exactness="lossy",
        summary="Needs less confidence for masks near a confident mask.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=("only masks of this pass are anchors, as in the released code",),
        remote={
            "threshold": Range(0, 1),
            "relaxed": Range(0, 1),
            "radius": Range(0, 4096),
            "block": Range(0, 4096),
            "cache": BLOCKWISE_WORDS,
        },
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
    """Denoises with a threshold that is lower near confident masks.

    Args:
        threshold: Masks with at least this confidence are anchors and are unmasked.
        relaxed: The threshold near an anchor.
        radius: The largest distance from an anchor, in positions.
        block: Positions per block (0: the whole canvas; default: up to 32).
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block" or "hierarchical" (`block` then counts the positions of a sub-block,
            by default 8).
        mask: The mask token (default: the tokenizer's).
    """
    unmask = AnchorUnmasking(threshold, relaxed, radius)
    blocks, policy = blocks_and_cache(block, cache)
    return Denoiser(blocks, Confidence(), unmask, policy, mask=mask)
