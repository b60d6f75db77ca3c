"""SDAR: blocks are denoised from left to right over an exact key-value cache; each step unmasks
every mask above a confidence threshold or follows a schedule (Cheng et al., "SDAR: A Synergistic
Diffusion-AutoRegression Paradigm for Scalable Sequence Generation", arXiv:2510.06303)."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import DEVIATIONS, BlockCausalCache
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.rankings import Confidence, Leftmost
from anydecode.decoders.diffusion.unmasking import (
    ThresholdOrSchedule,
    TopKUnmasking,
)
from anydecode.errors import InvalidRequestError

STRATEGIES = ("dynamic", "static", "sequential")


_WORKS_WITH = ("batches", "samplers", "constraints", "streaming", "infilling")


class BlockSchedule(TopKUnmasking):
    """Unmasks a share of the block size in each of `steps` steps, even if the prompt fills part of
    the block."""

    def quota(self, canvas: Canvas) -> int:
        size = canvas.block_size or canvas.block_masks
        base, remainder = divmod(size, min(self.steps or size, size))
        return base + (canvas.block_step < remainder)


@register(
    Card(
        "sdar",
        "diffusion",
        paper="SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence"
        " Generation (arXiv:2510.06303)",
        exactness="lossy",
        summary="Blocks over an exact cache; unmasks all masks above a threshold.",
        needs=("block-diffusion model",),
        works_with=_WORKS_WITH,
        deviations=(
            *DEVIATIONS,
            "the cache gives the same output as full passes over the same blocks",
        ),
        remote={
            "block": Range(1, 4096),
            "steps": Range(1, 4096),
            "remasking": Words(("dynamic", "static", "sequential")),
            "threshold": Range(0, 1),
        },
    )
)
def sdar(
    block: int | None = None,
    steps: int | None = None,
    remasking: str = "dynamic",
    threshold: float = 0.85,
    mask: int | None = None,
) -> Denoiser:
    """Denoises block by block with an exact cache.

    Args:
        block: Positions per block (default: the model's own block size).
        steps: Denoising steps per block (default: one per position).
        remasking: "dynamic" unmasks every mask above `threshold` if those are more than the
            schedule's; "static" follows the schedule; "sequential" does so from the left.
        threshold: The confidence threshold of "dynamic".
        mask: The mask token (default: the tokenizer's).
    """
    if remasking not in STRATEGIES:
        raise InvalidRequestError(
            f"remasking={remasking!r} is unknown; it must be one of {', '.join(STRATEGIES)}"
        )
    schedule = BlockSchedule(steps)
    unmask = ThresholdOrSchedule(threshold, schedule) if remasking == "dynamic" else schedule
    position_ranking = Leftmost() if remasking == "sequential" else Confidence()
    cache = BlockCausalCache(block)
    return Denoiser(FixedBlocks(block), position_ranking, unmask, cache, mask=mask, tempered=True)
