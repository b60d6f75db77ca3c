"""Prophet (Li et al., "Diffusion Language Models Know the Answer Before Decoding",
arXiv:2508.19982).

All masks are unmasked at once as soon as the mean gap between the two largest logits of the
answer's positions is large enough. The required gap becomes smaller as decoding proceeds.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import RANKING_WORDS, ranking
from anydecode.decoders.diffusion.stops import StopRule
from anydecode.decoders.diffusion.unmasking import TopKUnmasking
from anydecode.errors import InvalidRequestError


class LogitGapStop(StopRule):
    """Unmasks the whole canvas when the mean logit gap of the answer is large enough.

    Args:
        gaps: The required gaps in the first, second and last third of the canvas's progress.
        start: The first position of the answer, counted from the end of the prompt.
        count: The number of positions of the answer (default: to the end of the canvas).
    """

    needs_all_masks = True

    def __init__(self, gaps: tuple[float, float, float], start: int, count: int | None) -> None:
        if start < 0 or (count is not None and count < 1):
            raise InvalidRequestError(
                f"the answer needs start >= 0 and count >= 1, not start={start}, count={count}"
            )
        self.gaps = gaps
        self.start = start
        self.count = count

    def extra_positions(self, canvas: Canvas) -> np.ndarray:
        return np.union1d(canvas.masks, self._answer(canvas))

    def fills_all(self, canvas: Canvas, predictions: Predictions) -> bool:
        answer = [position for position in self._answer(canvas) if position in predictions]
        if not answer:
            return False
        num_committed = np.count_nonzero(canvas.committed >= 0)
        progress = num_committed / (num_committed + len(canvas.masks))
        min_gap = self.gaps[0 if progress < 0.33 else 1 if progress < 0.67 else 2]
        gaps = [predictions.statistics(position).gap for position in answer]
        return float(np.mean(gaps)) >= min_gap

    def _answer(self, canvas: Canvas) -> np.ndarray:
        first = min(canvas.policy_state["start"] + self.start, len(canvas))
        stop = len(canvas) if self.count is None else min(first + self.count, len(canvas))
        return np.arange(first, stop)


@register(
    Card(
        "prophet",
        "diffusion",
        paper="Diffusion Language Models Know the Answer Before Decoding (arXiv:2508.19982)",
        exactness="lossy",
        summary="Unmasks everything as soon as the answer's two largest logits are far apart.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the answer is the whole canvas unless start and count are given; the released code"
            " fixes an anchor phrase there (put it into the prompt, between masks)",
            "progress is the share of unmasked positions, which is steps / all steps with the"
            " paper's uniform schedule",
            "above temperature 0 the remaining masks are sampled; the paper fills them with the"
            " most probable tokens",
        ),
        remote={
            "early": Range(0, 100),
            "middle": Range(0, 100),
            "late": Range(0, 100),
            "start": Range(0, 4096),
            "count": Range(1, 4096),
            "block": Range(0, 4096),
            "steps": Range(1, 4096),
            "remasking": RANKING_WORDS,
        },
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
    """Denoises in blocks, and unmasks everything once the answer is certain.

    The scale of logits differs between models, so the gaps may need to be adapted.

    Args:
        early: The mean logit gap that suffices in the first third of the canvas's progress.
        middle: The same for the second third.
        late: The same for the last third.
        start: The first position of the answer, counted from the end of the prompt.
        count: The number of positions of the answer (default: to the end of the canvas).
        block: Positions per block (0: the whole canvas; default: up to 32).
        steps: Denoising steps per block (default: one per mask).
        remasking: The ranking: "confidence", "random", "margin", "entropy" or "leftmost".
        mask: The mask token (default: the tokenizer's).
    """
    stop = LogitGapStop((early, middle, late), start, count)
    return Denoiser(
        FixedBlocks(block), ranking(remasking), TopKUnmasking(steps), stop=stop, mask=mask
    )
