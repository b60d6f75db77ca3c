"""Block diffusion: blocks one after the other, each denoised against exact keys of those before.

The decoders of SDAR (Cheng et al., "SDAR: A Synergistic Diffusion-AutoRegression Paradigm for
Scalable Sequence Generation", arXiv:2510.06303) and of BD3-LM (Arriola et al., "Block Diffusion:
Interpolating Between Autoregressive and Diffusion Language Models", arXiv:2503.09573).
"""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import BlockCausalCache
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.rankings import Confidence, Leftmost, Random
from anydecode.decoders.diffusion.unmasking import (
    ThresholdOrSchedule,
    ThresholdUnmasking,
    TopKUnmasking,
)
from anydecode.errors import InvalidRequestError

STRATEGIES = ("dynamic", "static", "sequential")
_WORKS_WITH = ("batches", "samplers", "constraints", "streaming", "infilling")
_BLOCKS = (
    "a finished block is stored in the pass that opens the next one, which saves a pass a block",
    "a prompt is prefilled block by block in one pass",
)


def _checked(block: int | None) -> int | None:
    if block is not None and block < 1:
        raise InvalidRequestError("a block needs at least one position")
    return block


class BlockSchedule(TopKUnmasking):
    """A share of the block's size in each of `steps` passes, whatever of it the prompt fills."""

    def quota(self, canvas: Canvas) -> int:
        size = canvas.size or canvas.block_masks
        base, more = divmod(size, min(self.steps or size, size))
        return base + (canvas.block_step < more)


@register(
    Card(
        "sdar",
        "diffusion",
        paper="SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence"
        " Generation (arXiv:2510.06303)",
        exactness="lossy",
        summary="Blocks over an exact cache; in a block, all masks above a threshold.",
        needs=("block-diffusion model",),
        works_with=_WORKS_WITH,
        deviations=(*_BLOCKS, "the cache is lossless against full passes of the same blocks"),
    )
)
def sdar(
    block: int | None = None,
    steps: int | None = None,
    remasking: str = "dynamic",
    threshold: float = 0.85,
    mask: int | None = None,
) -> Denoiser:
    """`block` positions see each other (default: the model's own size, else 4) and take `steps`
    passes (default: one token each), or fewer where `remasking` is "dynamic" and more masks are
    above `threshold`; "static" keeps to the schedule, "sequential" goes from the left."""
    if remasking not in STRATEGIES:
        raise InvalidRequestError(f"remasking is {', '.join(STRATEGIES)}; not {remasking!r}")
    schedule = BlockSchedule(steps)
    unmask = ThresholdOrSchedule(threshold, schedule) if remasking == "dynamic" else schedule
    ranked = Leftmost() if remasking == "sequential" else Confidence()
    cache = BlockCausalCache(_checked(block))
    return Denoiser(FixedBlocks(block), ranked, unmask, cache, mask=mask, tempered=True)


@register(
    Card(
        "bd3-lm",
        "diffusion",
        paper="Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models"
        " (arXiv:2503.09573); Masked Diffusion Models are Secretly Time-Agnostic Masked Models and"
        " Exploit Inaccurate Categorical Sampling (arXiv:2409.02908)",
        exactness="lossy",
        summary="Blocks over an exact cache; in a block, one mask at a time in random order.",
        needs=("block-diffusion model",),
        works_with=_WORKS_WITH,
        deviations=(
            *_BLOCKS,
            "models only that are told no time, or always the same, as the published ones are",
        ),
    )
)
def bd3_lm(block: int | None = None, mask: int | None = None) -> Denoiser:
    """The first-hitting sampler: which mask is filled next is a matter of chance, and one pass
    fills one. `block` as for `sdar`."""
    cache = BlockCausalCache(_checked(block))
    return Denoiser(FixedBlocks(block), Random(), ThresholdUnmasking(2.0), cache, mask=mask)
