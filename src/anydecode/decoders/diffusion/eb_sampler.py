"""Entropy-bounded unmasking (Ben-Hamu et al., "Accelerated Sampling from Masked Diffusion Models
via Entropy Bounded Unmasking", arXiv:2505.24857).

Each step unmasks as many of the best-ranked masks as possible while the sum of their entropies,
without the largest, stays below a bound.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import BLOCKWISE_WORDS, blocks_and_cache
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import RANKING_WORDS, best_first, ranking
from anydecode.decoders.diffusion.unmasking import UnmaskPolicy, top_k
from anydecode.errors import InvalidRequestError


class EntropyBoundedUnmasking(UnmaskPolicy):
    """Unmasks the n best-ranked masks, for the largest n such that the sum of their entropies,
    without the largest one, is at most `gamma` nats.

    This bounds the difference between their joint distribution and the product of their marginals.
    """

    def __init__(self, gamma: float) -> None:
        if not gamma >= 0:
            raise InvalidRequestError(f"gamma must be at least 0, not {gamma}")
        self.gamma = gamma

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        entropies = predictions.entropies(positions)[best_first(ranks)]
        error_bounds = np.cumsum(entropies) - np.maximum.accumulate(entropies)
        return top_k(ranks, int(np.count_nonzero(error_bounds <= self.gamma)))


@register(
    Card(
        "eb-sampler",
        "diffusion",
        paper="Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking"
        " (arXiv:2505.24857)",
        exactness="lossy",
        summary="Unmasks masks together while the sum of their entropies is small.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=("entropies are those of the model's own distribution at any temperature",),
        remote={
            "gamma": Range(0, 100),
            "remasking": RANKING_WORDS,
            "block": Range(0, 4096),
            "cache": BLOCKWISE_WORDS,
        },
    )
)
def eb_sampler(
    gamma: float = 0.1,
    remasking: str = "confidence",
    block: int | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises with a bound on the joint entropy.

    Args:
        gamma: The bound, in nats, of the sum of entropies without the largest.
        remasking: The ranking: "confidence", "random", "margin", "entropy" or "leftmost".
        block: Positions per block (0: the whole canvas; default: up to 32).
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block" or "hierarchical" (`block` then counts the positions of a sub-block,
            by default 8).
        mask: The mask token (default: the tokenizer's).
    """
    blocks, policy = blocks_and_cache(block, cache)
    unmask = EntropyBoundedUnmasking(gamma)
    return Denoiser(blocks, ranking(remasking), unmask, policy, mask=mask)
