"""RemeDi (Huang et al., "Don't Settle Too Early: Self-Reflective Remasking for Diffusion Language
Models", arXiv:2509.23653): each step fills all masks of the block, ranks all its tokens, keeps the
best-ranked ones and masks the others again."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.canvas import MASKED, Canvas
from anydecode.decoders.diffusion.named_caches import REVISING_CACHES, REVISING_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.revising import STATEFUL, RevisedBlocks, RevisingDenoiser
from anydecode.decoders.diffusion.unmasking import TopKUnmasking, top_k
from anydecode.scoring.sequence import Sequence


class SelfReflection(RevisingDenoiser):
    """Keeps as many tokens in step k as a schedule has unmasked after it, ranked by the logit of
    each token: the sampled one of a mask, the held one of another position."""

    def __init__(self, steps: int | None, block: int | None, cache: str, mask: int | None) -> None:
        self.schedule = TopKUnmasking(steps)
        policy = cache_named(cache, REVISING_CACHES)
        super().__init__(RevisedBlocks(block), unmask=self.schedule, cache=policy, mask=mask)

    def revise(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        positions = self.free_positions(canvas)
        was_masked = canvas.committed[positions] == MASKED
        tokens = np.where(was_masked, predictions.tokens(positions), canvas.tokens[positions])
        logits = [
            predictions.logits(position)[token]
            for position, token in zip(positions, tokens, strict=True)
        ]
        num_kept = self._num_kept(canvas)
        is_kept = top_k(np.array(logits, np.float64), num_kept)
        self.finish_revision(
            sequence,
            canvas,
            predictions,
            positions[was_masked & is_kept],
            positions[~was_masked & ~is_kept],
            is_settled=num_kept >= canvas.block_masks,
        )

    def _num_kept(self, canvas: Canvas) -> int:
        """How many tokens the schedule has unmasked after this step."""
        steps = min(self.schedule.steps or canvas.block_masks, canvas.block_masks)
        base, remainder = divmod(canvas.block_masks, steps)
        finished = min(canvas.block_step + 1, steps)
        return finished * base + min(finished, remainder)


@register(
    Card(
        "remedi",
        "diffusion",
        paper="Don't Settle Too Early: Self-Reflective Remasking for Diffusion Language Models"
        " (arXiv:2509.23653)",
        exactness="lossy",
        summary="Ranks all tokens of the block in every step; masks all but the best again.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "tokens are ranked by their logits, as in the released inference, which does not read"
            " the confidences that the model's second stream computes",
            STATEFUL,
            "the mask token is never generated",
        ),
        missing=(
            "RemeDi's own checkpoints, whose second stream of layers gives each token a confidence",
        ),
        remote={
            "steps": Range(1, 4096),
            "block": Range(0, 4096),
            "cache": REVISING_WORDS,
        },
    )
)
def remedi(
    steps: int | None = None,
    block: int | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> SelfReflection:
    """Denoises block by block, and ranks the tokens of the block in every step.

    Args:
        steps: Denoising steps per block (default: one per mask).
        block: Positions per block (0: the whole canvas; default: the model's own, or up to 32).
        cache: "none", or "block" with a model that has blocks.
        mask: The mask token (default: the tokenizer's).
    """
    return SelfReflection(steps, block, cache, mask)
