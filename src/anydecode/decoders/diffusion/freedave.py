"""Free draft-and-verification (Wu and Zhang, "Free Draft-and-Verification: Toward Lossless Parallel
Decoding for Diffusion Large Language Models", arXiv:2510.00294)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import cache as cache_named
from anydecode.decoders.diffusion.chains import ChainDenoiser
from anydecode.decoders.diffusion.rankings import ranking


@register(
    Card(
        "freedave",
        "diffusion",
        paper="Free Draft-and-Verification (arXiv:2510.00294)",
        exactness="lossy",
        summary="The text of one token per pass under the same cache, in fewer passes.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "streaming", "infilling"),
        deviations=(
            "lossless against one token per pass over the same blocks and the same cache, at every"
            " temperature (the paper: greedy)",
            "one token per step only, where the exact and the subset rule are one",
            "drafts end with the block (no eager mode), and there is no threshold variant (++)",
            "constraints and other policies with a memory go one token per pass",
        ),
    )
)
def freedave(
    drafts: int = 8,
    block: int | None = None,
    remasking: str = "confidence",
    cache: str = "none",
    mask: int | None = None,
) -> ChainDenoiser:
    """Verifies `drafts` canvases per pass."""
    return ChainDenoiser(drafts, FixedBlocks(block), ranking(remasking), cache_named(cache), mask)
