"""Masks are filled together as long as little is unknown about all but one of them (Ben-Hamu et
al., "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking",
arXiv:2505.24857)."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import cache as cache_named
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import best_first, ranking
from anydecode.decoders.diffusion.unmasking import UnmaskPolicy, best
from anydecode.errors import InvalidRequestError


class EntropyBounded(UnmaskPolicy):
    """The n best, for the largest n whose entropies, but for the largest of them, sum to at most
    `gamma` nats: that bounds what their joint distribution and the product of theirs differ by."""

    def __init__(self, gamma: float) -> None:
        if not gamma >= 0:
            raise InvalidRequestError("gamma cannot be negative")
        self.gamma = gamma

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        entropies = predictions.entropies(positions)[best_first(ranks)]
        unknown = np.cumsum(entropies) - np.maximum.accumulate(entropies)
        return best(ranks, int(np.count_nonzero(unknown <= self.gamma)))


@register(
    Card(
        "eb-sampler",
        "diffusion",
        paper="Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking"
        " (arXiv:2505.24857)",
        exactness="lossy",
        summary="Fills the surest masks together, all but one of them nearly certain.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "entropies are those of the model's own distribution, whatever the temperature",
        ),
    )
)
def eb_sampler(
    gamma: float = 0.1,
    remasking: str = "confidence",
    block: int | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Fills the n masks that `remasking` ranks best, for the largest n whose entropies sum to at
    most `gamma` nats without the largest of them. `block` masks at a time (0: the whole canvas;
    default: up to 32)."""
    blocks, unmask = FixedBlocks(block), EntropyBounded(gamma)
    return Denoiser(blocks, ranking(remasking), unmask, cache_named(cache), mask=mask)
