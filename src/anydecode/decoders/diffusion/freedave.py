"""Free draft-and-verification (Wu and Zhang, "Free Draft-and-Verification: Toward Lossless Parallel
Decoding for Diffusion Large Language Models", arXiv:2510.00294).

The canvases after each of the next denoising steps are drafted and verified together in one pass.
Drafts are accepted up to the first that one-token denoising would not have reached.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import CACHE_WORDS
from anydecode.decoders.diffusion.caches import cache as cache_named
from anydecode.decoders.diffusion.chains import ChainDenoiser
from anydecode.decoders.diffusion.rankings import RANKING_WORDS, ranking


@register(
    Card(
        "freedave",
        "diffusion",
        paper="Free Draft-and-Verification (arXiv:2510.00294)",
        exactness="lossy",
        summary="Generates the text of one-token denoising (same cache) in fewer passes.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "streaming", "infilling"),
        deviations=(
            "lossless against one token per pass with the same blocks and the same cache, at every"
            " temperature (the paper: greedy decoding)",
            "drafts one token per step only, for which the exact and the subset rule are the same",
            "drafts end with the block (no eager mode), and there is no threshold variant (++)",
            "with constraints and other stateful samplers, one token per pass is generated",
            "by default (cache='none') every pass computes the whole canvas; the paper uses the"
            " dual cache",
        ),
        remote={
            "drafts": Range(1, 64),
            "block": Range(0, 4096),
            "remasking": RANKING_WORDS,
            "cache": CACHE_WORDS,
        },
    )
)
def freedave(
    drafts: int = 8,
    block: int | None = None,
    remasking: str = "confidence",
    cache: str = "none",
    mask: int | None = None,
) -> ChainDenoiser:
    """Denoises one token per step, and verifies several steps per pass.

    Args:
        drafts: How many draft canvases a pass verifies.
        block: Positions per block (0: the whole canvas; default: up to 32).
        remasking: The ranking: "confidence", "random", "margin", "entropy" or "leftmost".
        cache: "none", "prefix" or "dual".
        mask: The mask token (default: the tokenizer's).
    """
    return ChainDenoiser(drafts, FixedBlocks(block), ranking(remasking), cache_named(cache), mask)
