"""The answer is known before the last pass: fill everything once the gap between the two largest
logits is wide (Li et al., "Diffusion Language Models Know the Answer Before Decoding",
arXiv:2508.19982)."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import ranking
from anydecode.decoders.diffusion.stops import StopRule
from anydecode.decoders.diffusion.unmasking import TopKUnmasking
from anydecode.errors import InvalidRequestError


class LogitGap(StopRule):
    """Fills the canvas when the mean gap of the answer's `count` positions from `start` on (counted
    from the end of the prompt; None: to the end) reaches `gaps[k]`, k the third of the way done."""

    def __init__(self, gaps: tuple[float, float, float], start: int, count: int | None) -> None:
        if start < 0 or (count is not None and count < 1):
            raise InvalidRequestError("the answer needs a start of at least 0 and one position")
        self.gaps = gaps
        self.start = start
        self.count = count

    def wants(self, canvas: Canvas) -> np.ndarray:
        return np.union1d(canvas.masks, self._answer(canvas))

    def fills(self, canvas: Canvas, predictions: Predictions) -> bool:
        answer = [position for position in self._answer(canvas) if position in predictions]
        if not answer:
            return False
        done = np.count_nonzero(canvas.committed >= 0)
        progress = done / (done + len(canvas.masks))
        least = self.gaps[0 if progress < 0.33 else 1 if progress < 0.67 else 2]
        return float(np.mean([predictions.facts(position).gap for position in answer])) >= least

    def _answer(self, canvas: Canvas) -> np.ndarray:
        first = min(canvas.memory["start"] + self.start, len(canvas))
        stop = len(canvas) if self.count is None else min(first + self.count, len(canvas))
        return np.arange(first, stop)


@register(
    Card(
        "prophet",
        "diffusion",
        paper="Diffusion Language Models Know the Answer Before Decoding (arXiv:2508.19982)",
        exactness="lossy",
        summary="Fills every mask at once as soon as the answer's logits are far apart.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the answer's region is the whole canvas unless start and count name one; the released"
            " code plants an anchor phrase there (put it into the prompt, between masks)",
            "progress is the share of masks filled: steps / all steps under the paper's uniform"
            " schedule",
        ),
    )
)
def prophet(
    early: float = 7.5,
    middle: float = 5.0,
    late: float = 2.5,
    start: int = 0,
    count: int | None = None,
    block: int | None = None,
    steps: int | None = None,
    remasking: str = "confidence",
    mask: int | None = None,
) -> Denoiser:
    """The gaps, in logits, that suffice in the first, second and last third of the passes: logits
    are scaled otherwise in every model. `start` and `count` are where the answer stands."""
    stop = LogitGap((early, middle, late), start, count)
    return Denoiser(
        FixedBlocks(block), ranking(remasking), TopKUnmasking(steps), stop=stop, mask=mask
    )
