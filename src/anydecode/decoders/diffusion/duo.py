"""Duo (Sahoo et al., "The Diffusion Duality", arXiv:2506.10892) and its psi-samplers: ancestral
sampling of uniform-state diffusion, in which each step draws every position from the posterior of
what it holds and what the model predicts."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.named_caches import EXACT_CACHES, EXACT_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.posteriors import (
    NoiseLevel,
    clean_distribution,
    draw,
    posterior,
)
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.uniform import STATEFUL, UniformDenoiser
from anydecode.decoders.diffusion.unmasking import check_steps
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence


class Duo(UniformDenoiser):
    """Samples from `kappa` times the posterior plus 1 - `kappa` times fresh noise around a sample
    of the posterior at time 0."""

    kappa = 1.0

    def denoise(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        positions: np.ndarray,
        is_last: bool,
    ) -> tuple[np.ndarray, bool]:
        size = len(predictions.logits(positions[0]))
        num_tokens = size - (0 <= canvas.mask < size)
        steps = self.num_steps(canvas)
        now, later = (
            NoiseLevel(share, 0.0, (1 - share) / num_tokens)
            for share in (canvas.block_step / steps, (canvas.block_step + 1) / steps)
        )
        clean = [clean_distribution(predictions, position) for position in positions]
        self.predicted(sequence, canvas, positions, clean)
        tokens = [
            draw(
                sequence,
                self._distribution(int(canvas.tokens[position]), row, now, later, canvas.mask),
                int(position),
                predictions.step,
            )
            for position, row in zip(positions, clean, strict=True)
        ]
        return np.array(tokens), is_last

    def _distribution(
        self, held: int, clean: np.ndarray, now: NoiseLevel, later: NoiseLevel, mask: int
    ) -> np.ndarray:
        ancestral = posterior(held, clean, now, later, mask)
        if self.kappa == 1:
            return ancestral
        first = posterior(held, clean, now, NoiseLevel(1.0, 0.0, 0.0), mask)
        renoised = later.share * first + later.vector(len(clean), mask)
        return self.kappa * ancestral + (1 - self.kappa) * renoised


@register(
    Card(
        "duo",
        "diffusion",
        paper="The Diffusion Duality (arXiv:2506.10892)",
        exactness="lossy",
        summary="Ancestral sampling for models whose noise is random tokens.",
        needs=("uniform-state diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "time runs from 1 to 0 in equal steps over each block; the released code stops at 1e-5,"
            " and at time 1 one of 1000 tokens is not noise",
            "kappa is constant over time",
            "discrete consistency distillation (train distil --method duo) is for models without a"
            " time input, and does not average the weights over the training",
            STATEFUL,
        ),
        remote={
            "steps": Range(1, 4096),
            "kappa": Range(0, 1),
            "block": Range(0, 4096),
            "cache": EXACT_WORDS,
        },
    )
)
def duo(
    steps: int | None = None,
    kappa: float = 1.0,
    block: int = 0,
    cache: str = "none",
    mask: int | None = None,
) -> Duo:
    """Denoises random tokens by ancestral sampling.

    Args:
        steps: Steps per block (default: one per position).
        kappa: 1: ancestral sampling. Below 1, positions are with this probability drawn from the
            posterior, else their token is predicted and covered with fresh noise (the psi-sampler).
        block: Positions per block (0: the model's blocks, or the whole canvas).
        cache: "none", or "block" with a model that has blocks.
        mask: A token that is neither noise nor predicted (default: the tokenizer's mask token).
    """
    if not 0 <= kappa <= 1:
        raise InvalidRequestError(f"kappa must be between 0 and 1, not {kappa}")
    check_steps(steps)
    decoder = Duo(FixedBlocks(block), cache=cache_named(cache, EXACT_CACHES), mask=mask)
    decoder.steps, decoder.kappa = steps, kappa
    return decoder
