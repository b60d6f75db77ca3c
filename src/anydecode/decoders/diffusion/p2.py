"""Path planning (Peng et al., "Path Planning for Masked Diffusion Model Sampling",
arXiv:2502.03540): in every step, all positions of the canvas are ranked again, and the worst-ranked
ones are masked, whether they held a token or not."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.canvas import MASKED, Canvas
from anydecode.decoders.diffusion.named_caches import REVISING_CACHES, REVISING_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import RANKING_WORDS, best_first, ranking
from anydecode.decoders.diffusion.revising import STATEFUL, RevisedBlocks, RevisingDenoiser
from anydecode.decoders.diffusion.unmasking import check_steps
from anydecode.scoring.sequence import Sequence


class PathPlanning(RevisingDenoiser):
    """Step k of S masks the worst-ranked share 1 - (k + 1) / S of the block, rounded down. Other
    masks take their sampled tokens; other tokens stay."""

    steps: int | None = None

    def revise(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        positions = self.free_positions(canvas)
        steps = self.steps or canvas.block_masks
        num_masked = len(positions) * max(0, steps - canvas.block_step - 1) // steps
        order = best_first(self.ranking.rank(canvas, predictions, positions))
        is_masked = np.zeros(len(positions), bool)
        is_masked[order[len(positions) - num_masked :]] = True
        was_masked = canvas.committed[positions] == MASKED
        self.finish_revision(
            sequence,
            canvas,
            predictions,
            positions[was_masked & ~is_masked],
            positions[is_masked & ~was_masked],
            is_settled=canvas.block_step + 1 >= steps,
        )


@register(
    Card(
        "p2",
        "diffusion",
        paper="Path Planning for Masked Diffusion Model Sampling (arXiv:2502.03540)",
        exactness="lossy",
        summary="Ranks all positions in every step, and masks the worst of them again.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the planner is the denoiser itself (self-planning), as in Open-dLLM; its ranks of"
            " tokens are those of the tokens that it would sample in their place",
            STATEFUL,
            "the mask token is never generated",
        ),
        missing=("planners that are models of their own, and the weight of planned remasking",),
        remote={
            "steps": Range(1, 4096),
            "block": Range(0, 4096),
            "remasking": RANKING_WORDS,
            "cache": REVISING_WORDS,
        },
    )
)
def p2(
    steps: int | None = None,
    block: int = 0,
    remasking: str = "confidence",
    cache: str = "none",
    mask: int | None = None,
) -> PathPlanning:
    """Denoises with a plan that may take tokens back.

    Args:
        steps: Denoising steps per block (default: one per mask).
        block: Positions per block (0: the model's blocks, or the whole canvas).
        remasking: The ranking: "confidence", "random", "margin", "entropy" or "leftmost".
        cache: "none", or "block" with a model that has blocks.
        mask: The mask token (default: the tokenizer's).
    """
    check_steps(steps)
    policy = cache_named(cache, REVISING_CACHES)
    decoder = PathPlanning(RevisedBlocks(block), ranking(remasking), cache=policy, mask=mask)
    decoder.steps = steps
    return decoder
