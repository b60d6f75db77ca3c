"""Bounded adaptive confidence decoding, and think coarse, critic fine (Lu et al., "Advancing Block
Diffusion Language Models for Test-Time Scaling", arXiv:2602.09555).

The confidence threshold is the mean confidence of the tokens committed in the block so far, within
two bounds. Blocks are large while the model is thinking and small for the answer.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, Text, register
from anydecode.decoders.diffusion.blocks import BlockPolicy
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import CACHE_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.unmasking import UnmaskPolicy
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import TARGET, Sequence


class BoundedAdaptiveThreshold(UnmaskPolicy):
    """Unmasks every mask with a rank of at least the adaptive threshold.

    The threshold is the mean confidence of the tokens committed in this block, limited to the range
    `low` to `high`. In a new block the largest rank takes the place of the mean.
    """

    def __init__(self, low: float, high: float) -> None:
        if not 0 <= low <= high <= 1:
            raise InvalidRequestError(
                f"bacd-tccf needs 0 <= low <= high <= 1, not low={low}, high={high}"
            )
        self.low = low
        self.high = high

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        assert canvas.block is not None
        inside = slice(*canvas.block)
        committed = canvas.confidence[inside][canvas.committed[inside] >= 0]
        level = float(np.mean(committed)) if len(committed) else float(ranks.max())
        return ranks >= min(max(level, self.low), self.high)


class TwoPhaseBlocks(BlockPolicy):
    """Blocks of `coarse` positions until the marker is generated, of `fine` positions after it.

    The marker's tokens are in `canvas.policy_state["marker"]`.
    """

    def __init__(self, coarse: int, fine: int) -> None:
        if coarse < 1 or fine < 1:
            raise InvalidRequestError(
                f"coarse and fine must be at least 1, not {coarse} and {fine}"
            )
        self.coarse = coarse
        self.fine = fine

    def window_end(self, canvas: Canvas) -> int:
        marker: list[int] = canvas.policy_state["marker"]
        committed = canvas.tokens[canvas.policy_state["start"] : canvas.frontier].tolist()
        size = self.fine if _contains(marker, committed) else self.coarse
        return min(canvas.frontier + size, len(canvas))


class TwoPhaseDenoiser(Denoiser):
    """Encodes the marker into tokens when the canvas is created."""

    marker = "</think>"

    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        canvas.policy_state["marker"] = sequence.tokenizers[TARGET].encode(self.marker)
        super().begin(sequence, canvas)


@register(
    Card(
        "bacd-tccf",
        "diffusion",
        paper="Advancing Block Diffusion Language Models for Test-Time Scaling (arXiv:2602.09555)",
        exactness="lossy",
        summary="Adapts the threshold to the block's confidence; smaller blocks for the answer.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "if the model has blocks of its own, they limit what a row sees",
            "the second phase begins after the marker; the paper's progressive training of block"
            " sizes is not included",
            "by default (cache='none') every pass computes the whole canvas; the paper's models"
            " cache finished blocks",
        ),
        remote={
            "low": Range(0, 1),
            "high": Range(0, 1),
            "coarse": Range(1, 256),
            "fine": Range(1, 256),
            "marker": Text(64),
            "cache": CACHE_WORDS,
        },
    )
)
def bacd_tccf(
    low: float = 0.6,
    high: float = 0.9,
    coarse: int = 16,
    fine: int = 4,
    marker: str = "</think>",
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises with an adaptive threshold, in blocks of two sizes.

    Args:
        low: The smallest threshold.
        high: The largest threshold.
        coarse: Positions per block until `marker` is generated.
        fine: Positions per block after that.
        marker: The text that ends the thinking.
        cache: "none", "prefix", "dual", "vicinity", "window" or, with a model that has blocks,
            "block".
        mask: The mask token (default: the tokenizer's).
    """
    if not marker:
        raise InvalidRequestError("marker must not be empty: it is the text that ends the thinking")
    decoder = TwoPhaseDenoiser(
        TwoPhaseBlocks(coarse, fine),
        Confidence(),
        BoundedAdaptiveThreshold(low, high),
        cache_named(cache),
        mask=mask,
    )
    decoder.marker = marker
    return decoder


def _contains(part: list[int], tokens: list[int]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens) - len(part) + 1))
