"""The decoder of Dream (Ye et al., "Dream 7B: Diffusion Large Language Models", arXiv:2508.15487).

The whole canvas is denoised at once. A time grid gives the number of tokens per step, and the most
certain positions are unmasked first.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import CACHE_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Ranking, ranking
from anydecode.decoders.diffusion.unmasking import TimeGrid
from anydecode.errors import InvalidRequestError


class GumbelRanking(Ranking):
    """A ranking with Gumbel noise: `inner / temperature` + noise.

    The k best are k samples without replacement from the softmax of `inner / temperature`.
    """

    def __init__(self, inner: Ranking, temperature: float) -> None:
        self.inner = inner
        self.temperature = temperature

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        noise = predictions.sequence.noise.with_purpose("unmask")
        coins = np.array([noise.coin(int(position), predictions.step) for position in positions])
        result: np.ndarray = self.inner.rank(canvas, predictions, positions) / self.temperature
        result -= np.log(-np.log(coins))
        return result


class IndependentUnmasking(TimeGrid):
    """Unmasks each mask independently with probability 1 - s/t (Dream's "origin")."""

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        steps = self.steps or canvas.block_masks
        if canvas.block_step >= steps - 1:
            return np.ones(len(positions), bool)
        t, s = self.times(canvas.block_step, steps)
        noise = predictions.sequence.noise.with_purpose("unmask")
        coins = np.array(
            [noise.coin(int(position), predictions.step, index=1) for position in positions]
        )
        return coins < 1 - s / t


@register(
    Card(
        "dream",
        "diffusion",
        paper="Dream 7B: Diffusion Large Language Models (arXiv:2508.15487)",
        exactness="lossy",
        summary="Denoises the whole canvas along a time grid; lowest entropy first.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the default order is by entropy, as the authors recommend; in their code it is random",
            "a step unmasks at least one position, even if the time grid rounds down to none",
            "the mask token is never generated",
        ),
        remote={
            "steps": Range(1, 4096),
            "alg": Words(("entropy", "confidence", "margin", "origin")),
            "alg_temperature": Range(0, 100),
            "block": Range(0, 4096),
            "length": Range(1, 4096),
            "cache": CACHE_WORDS,
        },
    )
)
def dream(
    steps: int | None = None,
    alg: str = "entropy",
    alg_temperature: float = 0.0,
    block: int = 0,
    length: int | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises the whole canvas along a time grid.

    Args:
        steps: The number of denoising steps (default: one per mask).
        alg: The ranking: "entropy", "confidence" (maskgit_plus), "margin" (topk_margin) or
            "origin" (each mask independently at random).
        alg_temperature: Above 0, positions are sampled instead of taking the best-ranked ones.
        block: Positions per block (0: the whole canvas).
        length: The number of masks of a canvas (default: max_tokens).
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block".
        mask: The mask token (default: the tokenizer's).
    """
    if alg_temperature < 0:
        raise InvalidRequestError(f"alg_temperature must be at least 0, not {alg_temperature}")
    position_ranking = ranking("random" if alg == "origin" else alg)
    if alg_temperature:
        position_ranking = GumbelRanking(position_ranking, alg_temperature)
    unmask = IndependentUnmasking(steps) if alg == "origin" else TimeGrid(steps)
    return Denoiser(
        FixedBlocks(block),
        position_ranking,
        unmask,
        cache_named(cache),
        mask=mask,
        length=length,
        tempered=True,
    )
