"""Bounded adaptive confidence decoding, and think coarse, critic fine (Lu et al., "Advancing Block
Diffusion Language Models for Test-Time Scaling", arXiv:2602.09555).

The confidence threshold is the mean confidence of the tokens committed in the block so far, within
two bounds. Blocks are large while the model is thinking and small for the answer. Models are
trained for that with block sizes that double: `anydecode train block-adapter --first-block`.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, Text, register
from anydecode.decoders.diffusion.blocks import BlockPolicy
from anydecode.decoders.diffusion.caches import BlockCausalCache
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

    Args:
        coarse: Positions per block before the marker.
        fine: Positions per block after it.
        is_grid: Whether these are the blocks that rows see: then they are counted from the first
            position of the text, and the end of the prompt is part of the first one.
    """

    def __init__(self, coarse: int, fine: int, is_grid: bool = False) -> None:
        if coarse < 1 or fine < 1:
            raise InvalidRequestError(
                f"coarse and fine must be at least 1, not {coarse} and {fine}"
            )
        self.coarse = coarse
        self.fine = fine
        self.is_grid = is_grid

    def window_end(self, canvas: Canvas) -> int:
        marker: list[int] = canvas.policy_state["marker"]
        committed = canvas.tokens[canvas.policy_state["start"] : canvas.frontier].tolist()
        is_fine = _contains(marker, committed)
        if not self.is_grid:
            size = self.fine if is_fine else self.coarse
            return min(canvas.frontier + size, len(canvas))
        if is_fine and canvas.later_blocks is None and canvas.block is None:
            canvas.later_blocks = canvas.frontier, self.fine
        return min(canvas.block_end(canvas.frontier), len(canvas))


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
            "with another cache than block, a model's own blocks limit what a row sees",
            "the second phase begins after the marker",
            "by default (cache='none') every pass computes the whole canvas; the paper's models"
            " cache finished blocks (cache='block')",
            "the training with growing blocks (`anydecode train block-adapter --first-block`) is"
            " that of adapters, over one schedule of the learning rate",
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
        cache: "block": rows see the blocks of both phases, and finished blocks are cached exactly,
            for models that were trained with several block sizes; or "none", "prefix", "dual",
            "vicinity", "window".
        mask: The mask token (default: the tokenizer's).
    """
    if not marker:
        raise InvalidRequestError("marker must not be empty: it is the text that ends the thinking")
    is_grid = cache == "block"
    decoder = TwoPhaseDenoiser(
        TwoPhaseBlocks(coarse, fine, is_grid),
        Confidence(),
        BoundedAdaptiveThreshold(low, high),
        BlockCausalCache(coarse) if is_grid else cache_named(cache),
        mask=mask,
    )
    decoder.marker = marker
    return decoder


def _contains(part: list[int], tokens: list[int]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens) - len(part) + 1))
