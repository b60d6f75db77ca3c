"""The sampler of Dream: the whole canvas at once along a time grid, surest positions first (Ye et
al., "Dream 7B: Diffusion Large Language Models", arXiv:2508.15487)."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Ranking, ranking
from anydecode.decoders.diffusion.unmasking import TimeGrid
from anydecode.errors import InvalidRequestError


class Noisy(Ranking):
    """`inner` / `temperature` + Gumbel noise: the best k are k draws without replacement from the
    softmax of `inner` / `temperature`."""

    def __init__(self, inner: Ranking, temperature: float) -> None:
        self.inner = inner
        self.temperature = temperature

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        noise = predictions.sequence.noise.with_purpose("unmask")
        coins = np.array([noise.coin(int(position), predictions.step) for position in positions])
        result: np.ndarray = self.inner.rank(canvas, predictions, positions) / self.temperature
        result -= np.log(-np.log(coins))
        return result


class Flips(TimeGrid):
    """Every mask is filled with probability 1 - s/t, by itself (Dream's "origin")."""

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
        summary="The whole canvas at once along a time grid, least entropy first.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the order is by entropy, as its authors recommend, not by chance as its code defaults",
            "a pass fills at least one position, where the time grid rounds down to none",
            "the mask token is never written",
        ),
    )
)
def dream(
    steps: int | None = None,
    alg: str = "entropy",
    alg_temperature: float = 0.0,
    block: int = 0,
    length: int | None = None,
    mask: int | None = None,
) -> Denoiser:
    """`steps` passes (default: as many as masks). `alg` is "entropy", "confidence" (maskgit_plus),
    "margin" (topk_margin) or "origin" (each mask by a coin of its own); `alg_temperature` above 0
    draws the positions instead of taking the best."""
    if alg_temperature < 0:
        raise InvalidRequestError("alg_temperature must be 0 or more")
    ranked = ranking("random" if alg == "origin" else alg)
    if alg_temperature:
        ranked = Noisy(ranked, alg_temperature)
    unmask = Flips(steps) if alg == "origin" else TimeGrid(steps)
    return Denoiser(FixedBlocks(block), ranked, unmask, mask=mask, length=length, tempered=True)
