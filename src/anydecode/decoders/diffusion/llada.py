"""The plain sampler of LLaDA: full passes, blocks from the left, a fixed number of tokens a pass
(Nie et al., "Large Language Diffusion Models", arXiv:2502.09992)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.rankings import ranking
from anydecode.decoders.diffusion.unmasking import TopKUnmasking


@register(
    Card(
        "llada",
        "diffusion",
        paper="Large Language Diffusion Models (arXiv:2502.09992)",
        exactness="lossy",
        summary="Blocks from the left, in each the surest masks first, a fixed number per pass.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "blocks need not divide the canvas: the last one may be smaller",
            "steps count within a block (the paper's, divided by the number of blocks)",
            "no classifier-free guidance",
            "the mask token is never written",
        ),
    )
)
def llada(
    block: int | None = None,
    steps: int | None = None,
    remasking: str = "confidence",
    length: int | None = None,
    mask: int | None = None,
) -> Denoiser:
    """`block` masks at a time (0: the whole canvas; default: up to 32), each filled in `steps`
    passes (default: one token per pass). `remasking` is "confidence", "random", "margin",
    "entropy" or "leftmost"."""
    return Denoiser(
        FixedBlocks(block), ranking(remasking), TopKUnmasking(steps), mask=mask, length=length
    )
