"""CreditDecoding (Wang et al., "CreditDecoding: Accelerating Parallel Decoding in Diffusion Large
Language Models with Trace Credits", arXiv:2510.06133).

In each pass the most likely token of a mask earns credit, and older credits decay. The logarithm of
the credits is added to the logits, so tokens that stay the most likely are unmasked earlier.
"""

from __future__ import annotations

import math

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import BLOCKWISE_WORDS, blocks_and_cache
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.errors import InvalidRequestError
from anydecode.kernels.library import exponentials
from anydecode.scoring.sequence import Sequence


class CreditDenoiser(Denoiser):
    """Adds credits to the logits: for each mask of the block, {token: credit} in
    `canvas.policy_state["credit"]`."""

    weight = 0.7
    decay = 0.8
    power = 0.2

    def unmask_step(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        if canvas.block is None:
            canvas.policy_state["credit"] = {}
        credits: dict[int, dict[int, float]] = canvas.policy_state["credit"]

        def add_credits(position: int, logits: np.ndarray) -> np.ndarray:
            credit = {
                token: self.decay * value for token, value in credits.get(position, {}).items()
            }
            likeliest = int(logits.argmax())
            probability = 1 / exponentials(logits)[1]
            credit[likeliest] = credit.get(likeliest, 0.0) + probability**self.power
            credits[position] = credit
            adjusted: np.ndarray = logits.copy()
            for token, value in credit.items():
                adjusted[token] += np.float32(self.weight * math.log1p(value))
            return adjusted

        predictions.adjust(add_credits)
        super().unmask_step(sequence, canvas, predictions)


@register(
    Card(
        "creditdecoding",
        "diffusion",
        paper="CreditDecoding (arXiv:2510.06133)",
        exactness="lossy",
        summary="Raises the confidence of tokens that stay the most likely over several passes.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "only tokens that were the most likely in some pass have credit",
            "blocks of up to 32 positions by default (the paper's analysis: 64)",
        ),
        remote={
            "threshold": Range(0, 1),
            "weight": Range(0, 100),
            "decay": Range(0, 1),
            "power": Range(0, 10),
            "block": Range(0, 4096),
            "cache": BLOCKWISE_WORDS,
        },
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
    """Denoises from the logits plus `weight * log(1 + credit)`.

    Each pass multiplies all credits by `decay`. The most likely token then earns its probability to
    the power of `power`.

    Args:
        threshold: Masks with at least this confidence are unmasked.
        weight: The weight of the credits.
        decay: The factor of older credits, between 0 and 1.
        power: The exponent of the probability, at least 0.
        block: Positions per block (0: the whole canvas; default: up to 32).
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block" or "hierarchical" (`block` then counts the positions of a sub-block,
            by default 8).
        mask: The mask token (default: the tokenizer's).
    """
    if power < 0:
        raise InvalidRequestError(f"power must be 0 or more, not {power}")
    if not 0 <= decay <= 1:
        raise InvalidRequestError(f"decay must be between 0 and 1, not {decay}")
    blocks, policy = blocks_and_cache(block, cache)
    decoder = CreditDenoiser(
        blocks,
        Confidence(),
        ThresholdUnmasking(threshold),
        policy,
        mask=mask,
    )
    decoder.weight, decoder.decay, decoder.power = weight, decay, power
    return decoder
