"""Self speculative decoding (Gao et al., "Self Speculative Decoding for Diffusion Large Language
Models", arXiv:2510.04147).

The model drafts several denoising steps from its own predictions, most confident mask first. One
pass verifies the chain of drafts, which is accepted up to the first wrong draft.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import FixedBlocks, WholeCanvas
from anydecode.decoders.diffusion.caches import CACHE_WORDS
from anydecode.decoders.diffusion.caches import cache as cache_named
from anydecode.decoders.diffusion.chains import ChainDenoiser
from anydecode.decoders.diffusion.rankings import Confidence


@register(
    Card(
        "ssd",
        "diffusion",
        paper="Self Speculative Decoding for Diffusion Large Language Models (arXiv:2510.04147)",
        exactness="lossy",
        summary="Verifies several denoising steps, drafted by the model itself, in one pass.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "streaming", "infilling"),
        deviations=(
            "lossless against one token per pass, at every temperature",
            "no code was published; the root of a chain is not computed again: its predictions are"
            " those of the last accepted node",
            "chains only, no trees: the paper's own test cannot accept alternative tokens",
            "with constraints and other stateful samplers, one token per pass is generated",
        ),
        remote={
            "drafts": Range(1, 64),
            "block": Range(0, 4096),
            "cache": CACHE_WORDS,
        },
    )
)
def ssd(
    drafts: int = 4, block: int = 0, cache: str = "none", mask: int | None = None
) -> ChainDenoiser:
    """Denoises one token per step, and verifies a chain of steps per pass.

    Args:
        drafts: How many draft canvases a pass verifies.
        block: Positions per block (0: the whole canvas).
        cache: "none", "prefix" or "dual".
        mask: The mask token (default: the tokenizer's).
    """
    blocks = FixedBlocks(block) if block else WholeCanvas()
    return ChainDenoiser(drafts, blocks, Confidence(), cache_named(cache), mask)
