"""A threshold that follows the block's own certainty, and smaller blocks once thinking is over (Lu
et al., "Advancing Block Diffusion Language Models for Test-Time Scaling", arXiv:2602.09555):
bounded adaptive confidence decoding, and think coarse, critic fine."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import BlockPolicy
from anydecode.decoders.diffusion.caches import cache as cache_named
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.unmasking import UnmaskPolicy
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import TARGET, Sequence


class BoundedAdaptive(UnmaskPolicy):
    """Every mask ranked at least t: the mean confidence of what is committed in this block (at its
    beginning: the largest of all), held between `low` and `high`."""

    def __init__(self, low: float, high: float) -> None:
        if not 0 <= low <= high <= 1:
            raise InvalidRequestError("the bounds of the threshold need 0 <= low <= high <= 1")
        self.low = low
        self.high = high

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        assert canvas.block is not None
        inside = slice(*canvas.block)
        said = canvas.confidence[inside][canvas.committed[inside] >= 0]
        level = float(np.mean(said)) if len(said) else float(ranks.max())
        return ranks >= min(max(level, self.low), self.high)


class TwoPhases(BlockPolicy):
    """Blocks of `coarse` positions until the tokens `canvas.memory["marker"]` are said, of `fine`
    ones behind them."""

    def __init__(self, coarse: int, fine: int) -> None:
        if coarse < 1 or fine < 1:
            raise InvalidRequestError("a block needs at least one position")
        self.coarse = coarse
        self.fine = fine

    def window(self, canvas: Canvas) -> int:
        marker: list[int] = canvas.memory["marker"]
        said = canvas.tokens[canvas.memory["start"] : canvas.frontier].tolist()
        size = self.fine if _within(marker, said) else self.coarse
        return min(canvas.frontier + size, len(canvas))


class TwoPhaseDenoiser(Denoiser):
    """Looks up the marker's tokens once."""

    marker = "</think>"

    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        canvas.memory["marker"] = sequence.tokenizers[TARGET].encode(self.marker)
        super().begin(sequence, canvas)


@register(
    Card(
        "bacd-tccf",
        "diffusion",
        paper="Advancing Block Diffusion Language Models for Test-Time Scaling (arXiv:2602.09555)",
        exactness="lossy",
        summary="A threshold that follows the block's certainty; smaller blocks for the answer.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "where the model has blocks of its own, theirs bound what a row sees",
            "the second phase begins behind the marker; the paper's progressive training of block"
            " sizes is not here",
        ),
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
    """A threshold between `low` and `high`; blocks of `coarse` positions until `marker` is said, of
    `fine` ones then."""
    if not marker:
        raise InvalidRequestError("the marker between the phases is empty")
    made = TwoPhaseDenoiser(
        TwoPhases(coarse, fine),
        Confidence(),
        BoundedAdaptive(low, high),
        cache_named(cache),
        mask=mask,
    )
    made.marker = marker
    return made


def _within(part: list[int], whole: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))
