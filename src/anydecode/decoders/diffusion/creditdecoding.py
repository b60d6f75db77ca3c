"""Tokens that have been the favourite for several passes get credit (Wang et al.,
"CreditDecoding: Accelerating Parallel Decoding in Diffusion Large Language Models with Trace
Credits", arXiv:2510.06133)."""

from __future__ import annotations

import math

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
from anydecode.sampling.candidates import exponentials
from anydecode.scoring.sequence import Sequence


class CreditDenoiser(Denoiser):
    """Fuses logits with credits: per mask of the block, {token: credit} in
    `canvas.memory["credit"]`."""

    weight = 0.7
    decay = 0.8
    power = 0.2

    def fill(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        if canvas.block is None:
            canvas.memory["credit"] = {}
        held: dict[int, dict[int, float]] = canvas.memory["credit"]

        def fused(position: int, logits: np.ndarray) -> np.ndarray:
            credit = {token: self.decay * one for token, one in held.get(position, {}).items()}
            favourite = int(logits.argmax())
            probability = 1 / exponentials(logits)[1]
            credit[favourite] = credit.get(favourite, 0.0) + probability**self.power
            held[position] = credit
            changed: np.ndarray = logits.copy()
            for token, one in credit.items():
                changed[token] += np.float32(self.weight * math.log1p(one))
            return changed

        predictions.adjust(fused)
        super().fill(sequence, canvas, predictions)


@register(
    Card(
        "creditdecoding",
        "diffusion",
        paper="CreditDecoding (arXiv:2510.06133)",
        exactness="lossy",
        summary="A token that stays the favourite over passes counts as surer than it says.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=("credits are kept of tokens that were a favourite once; all others have none",),
    )
)
def creditdecoding(
    threshold: float = 0.9,
    weight: float = 0.7,
    decay: float = 0.8,
    power: float = 0.2,
    block: int | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """logits + `weight` log(1 + credit); each pass multiplies credits by `decay` and gives the
    favourite its probability to the `power`. Then commits confidences of `threshold`."""
    if power < 0:
        raise InvalidRequestError(f"power must be 0 or more, not {power}")
    if not 0 <= decay <= 1:
        raise InvalidRequestError("decay must be between 0 and 1")
    made = CreditDenoiser(
        FixedBlocks(block),
        Confidence(),
        ThresholdUnmasking(threshold),
        cache_named(cache),
        mask=mask,
    )
    made.weight, made.decay, made.power = weight, decay, power
    return made
