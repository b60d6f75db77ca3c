"""The decoder of LLaDA (Nie et al., "Large Language Diffusion Models", arXiv:2502.09992).

Blocks are denoised from left to right, without a cache. Each step unmasks a fixed number of the
best-ranked masks of the block, by default the most confident ones.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.rankings import RANKING_WORDS, ranking
from anydecode.decoders.diffusion.unmasking import TopKUnmasking


@register(
    Card(
        "llada",
        "diffusion",
        paper="Large Language Diffusion Models (arXiv:2502.09992)",
        exactness="lossy",
        summary="Blocks from left to right; unmasks a fixed number of confident masks per step.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the block size need not divide the canvas: the last block may be smaller",
            "steps are counted per block (the paper's number divided by the number of blocks)",
            "no classifier-free guidance",
            "the mask token is never generated",
        ),
        remote={
            "block": Range(0, 4096),
            "steps": Range(1, 4096),
            "remasking": RANKING_WORDS,
            "length": Range(1, 4096),
        },
    )
)
def llada(
    block: int | None = None,
    steps: int | None = None,
    remasking: str = "confidence",
    length: int | None = None,
    mask: int | None = None,
) -> Denoiser:
    """Denoises in blocks with a fixed number of tokens per step.

    Args:
        block: Positions per block (0: the whole canvas; default: up to 32).
        steps: Denoising steps per block (default: one per mask).
        remasking: The ranking: "confidence", "random", "margin", "entropy" or "leftmost".
        length: The number of masks of a canvas (default: max_tokens).
        mask: The mask token (default: the tokenizer's).
    """
    return Denoiser(
        FixedBlocks(block), ranking(remasking), TopKUnmasking(steps), mask=mask, length=length
    )
