"""Confidence-adaptive decoding (Liang et al., "CD4LM: Consistency Distillation and aDaptive
Decoding for Diffusion Language Models", arXiv:2601.02236).

Each step unmasks the masks above a confidence threshold, up to a maximum number. An end of text is
delayed until a share of the canvas is unmasked. The paper's distillation is
`anydecode train distil --method cd4lm`.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import BLOCKWISE_WORDS, blocks_and_cache
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.errors import InvalidRequestError


class DelayedEndOfText(Confidence):
    """Confidence, but an end of text ranks last until `share` of the canvas is unmasked."""

    def __init__(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise InvalidRequestError(f"min_filled must be between 0 and 1, not {share}")
        self.share = share

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        ranks = super().rank(canvas, predictions, positions)
        num_committed = np.count_nonzero(canvas.committed >= 0)
        if num_committed < self.share * (num_committed + len(canvas.masks)):
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
        summary="Up to 4 confident tokens per pass; no end of text before the canvas is half full.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "if only ends of text are left to choose from, the leftmost is unmasked",
            "runs on any diffusion model; the paper's results need its distillation (DSCD), which"
            " trains all weights of models with the layers of Llama, Qwen2, Qwen3 or Qwen3-MoE",
        ),
        remote={
            "threshold": Range(0, 1),
            "max_per_step": Range(1, 4096),
            "min_filled": Range(0, 1),
            "block": Range(0, 4096),
            "cache": BLOCKWISE_WORDS,
        },
    )
)
def cd4lm(
    threshold: float = 0.95,
    max_per_step: int = 4,
    min_filled: float = 0.5,
    block: int | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises with a threshold, a maximum per step and a delayed end of text.

    Args:
        threshold: Masks with at least this confidence are unmasked.
        max_per_step: The largest number of tokens per step.
        min_filled: The share of the canvas that must be unmasked before an end of text.
        block: Positions per block (0: the whole canvas; default: up to 32).
        cache: "none", "prefix", "dual", "vicinity", "window", "elastic" or, with a model that
            has blocks, "block" or "hierarchical" (`block` then counts the positions of a sub-block,
            by default 8).
        mask: The mask token (default: the tokenizer's).
    """
    if max_per_step < 1:
        raise InvalidRequestError(
            f"max_per_step must be at least 1 (at least one token per pass), not {max_per_step}"
        )
    unmask = ThresholdUnmasking(threshold, max_per_step)
    blocks, policy = blocks_and_cache(block, cache)
    return Denoiser(blocks, DelayedEndOfText(min_filled), unmask, policy, mask=mask)
