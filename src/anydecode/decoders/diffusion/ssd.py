"""Self speculative decoding (Gao et al., "Self Speculative Decoding for Diffusion Large Language
Models", arXiv:2510.04147)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks, WholeCanvas
from anydecode.decoders.diffusion.caches import cache as cache_named
from anydecode.decoders.diffusion.chains import ChainDenoiser
from anydecode.decoders.diffusion.rankings import Confidence


@register(
    Card(
        "ssd",
        "diffusion",
        paper="Self Speculative Decoding for Diffusion Large Language Models (arXiv:2510.04147)",
        exactness="lossy",
        summary="A chain of the model's own guesses over the whole canvas, verified in one pass.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "streaming", "infilling"),
        deviations=(
            "lossless against one token per pass, at every temperature",
            "no code was published; the chain's root is not computed again, its predictions are"
            " those of the last accepted node",
            "chains only: alternative tokens cannot be accepted by the paper's own test",
            "constraints and other policies with a memory go one token per pass",
        ),
    )
)
def ssd(
    drafts: int = 4, block: int = 0, cache: str = "none", mask: int | None = None
) -> ChainDenoiser:
    """A chain of `drafts` nodes per pass over blocks of `block` positions (0: the whole canvas)."""
    blocks = FixedBlocks(block) if block else WholeCanvas()
    return ChainDenoiser(drafts, blocks, Confidence(), cache_named(cache), mask)
