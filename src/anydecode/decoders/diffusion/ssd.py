"""Self speculative decoding (Gao et al., "Self Speculative Decoding for Diffusion Large Language
Models", arXiv:2510.04147).

The model drafts several denoising steps from its own predictions. One pass verifies a tree of
drafted canvases: at each depth, the drafts before it are unmasked, and the next one or one of those
ranked after it. The path that one-token denoising takes is kept.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.chains import ChainDenoiser, Node
from anydecode.decoders.diffusion.named_caches import DRAFT_CACHES
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.errors import InvalidRequestError


class TreeDenoiser(ChainDenoiser):
    """Drafts a tree in which the order of the steps may differ from that of the last predictions.

    A node of depth k holds the k - 1 best-ranked drafts and one of the `width` drafts after them.
    Nodes of equal drafts are one node, so that a path that takes two drafts in the other order
    returns to the trunk.
    """

    width = 2

    def nodes(self, canvas: Canvas, predictions: Predictions, chain: np.ndarray) -> list[Node]:
        nodes: list[Node] = [(0,)]
        for trunk in range(1, len(chain)):
            for last in range(trunk, min(trunk + self.width, len(chain))):
                if len(nodes) == self.drafts:
                    return nodes
                nodes.append((*range(trunk), last))
        return nodes


@register(
    Card(
        "ssd",
        "diffusion",
        paper="Self Speculative Decoding for Diffusion Large Language Models (arXiv:2510.04147)",
        exactness="lossy",
        summary="Verifies a tree of denoising steps, drafted by the model itself, in one pass.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "streaming", "infilling"),
        deviations=(
            "lossless against one token per pass, at every temperature",
            "no code was published: the shape of the tree (the order of neighbouring steps varies)"
            " is our choice",
            "the root is not computed again: its predictions are those of the last accepted node",
            "with constraints and other stateful samplers, one token per pass is generated",
        ),
        remote={
            "drafts": Range(1, 64),
            "width": Range(1, 64),
            "block": Range(0, 4096),
            "cache": Words(DRAFT_CACHES),
        },
    )
)
def ssd(
    drafts: int = 8,
    width: int = 2,
    block: int = 0,
    cache: str = "none",
    mask: int | None = None,
) -> ChainDenoiser:
    """Denoises one token per step, and verifies a tree of steps per pass.

    Args:
        drafts: How many draft canvases a pass verifies.
        width: How many drafts compete for each step; 1: a chain.
        block: Positions per block (0: the model's blocks, or the whole canvas).
        cache: "none", "prefix", "dual" or, with a model that has blocks, "block".
        mask: The mask token (default: the tokenizer's).
    """
    if width < 1:
        raise InvalidRequestError(f"width must be at least 1, not {width}")
    decoder = TreeDenoiser(
        drafts, FixedBlocks(block), Confidence(), cache_named(cache, DRAFT_CACHES), mask
    )
    decoder.width = width
    return decoder
