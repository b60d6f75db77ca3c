"""Free draft-and-verification (Wu and Zhang, "Free Draft-and-Verification: Toward Lossless Parallel
Decoding for Diffusion Large Language Models", arXiv:2510.00294).

The canvases after each of the next denoising steps are drafted and verified together in one pass.
Drafts are accepted up to the first that slow denoising would not have reached. FreeDave++ drafts
and verifies steps that unmask every mask above a threshold.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.chains import ChainDenoiser, Drafts, Node
from anydecode.decoders.diffusion.named_caches import DRAFT_CACHES
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import RANKING_WORDS, best_first, ranking
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError


class ThresholdChains(ChainDenoiser):
    """FreeDave++: a step unmasks every mask of its block above `threshold`, or the best one.

    The first draft is the canvas after such a step; each further draft has one more mask unmasked.
    From draft to draft, the largest is accepted whose masks a step from the accepted one unmasks
    with the same tokens.
    """

    threshold = 0.95

    def nodes(self, canvas: Canvas, predictions: Predictions, chain: np.ndarray) -> list[Node]:
        count = len(self._step(canvas, predictions, chain))
        last = min(count + self.drafts - 1, len(chain))
        return [tuple(range(k)) for k in range(count, last + 1)]

    def walk(
        self, canvas: Canvas, predictions: Predictions, drafts: Drafts
    ) -> list[tuple[Predictions, np.ndarray]]:
        node = drafts.nodes[0]
        path = [(predictions, drafts.chain[list(node)])]
        while node in drafts.scored:
            source = drafts.scored[node]
            source.step = canvas.step + len(path)
            remaining = np.setdiff1d(drafts.positions, drafts.chain[list(node)])
            unmasked = self._step(canvas, source, self._order(canvas, source, remaining))
            reached = len(node)
            while (
                reached < len(drafts.chain)
                and drafts.chain[reached] in unmasked
                and source.token(drafts.chain[reached]) == drafts.tokens[reached]
            ):
                reached += 1
            if reached == len(node):
                break
            path.append((source, drafts.chain[len(node) : reached]))
            node = tuple(range(reached))
        return path

    def _step(self, canvas: Canvas, predictions: Predictions, ordered: np.ndarray) -> np.ndarray:
        """Those of the `ordered` masks that a step unmasks, in this order."""
        end = self.block_grid.end_of_block(canvas, int(ordered[0]))
        block = ordered[ordered < end]
        is_confident = predictions.confidence(block) >= self.threshold
        is_confident[best_first(predictions.confidence(block))[0]] = True
        chosen: np.ndarray = block[is_confident]
        return chosen


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
            " temperature (the paper: greedy decoding); with `threshold` (FreeDave++) not, as in"
            " the paper",
            "drafts one token per step only, for which the exact and the subset rule are the same",
            "drafts beyond the block (ahead) need cache=none or cache=block, with which opening a"
            " block changes no other row",
            "with constraints and other stateful samplers, one token per pass is generated",
            "by default (cache='none') every pass computes the whole canvas; the paper uses the"
            " dual cache, or that of finished blocks",
        ),
        remote={
            "drafts": Range(1, 64),
            "block": Range(0, 4096),
            "remasking": RANKING_WORDS,
            "cache": Words(DRAFT_CACHES),
            "ahead": Range(0, 16),
            "threshold": Range(0, 1),
        },
    )
)
def freedave(
    drafts: int = 8,
    block: int | None = None,
    remasking: str = "confidence",
    cache: str = "none",
    ahead: int = 0,
    threshold: float | None = None,
    mask: int | None = None,
) -> ChainDenoiser:
    """Denoises one token per step, and verifies several steps per pass.

    Args:
        drafts: How many draft canvases a pass verifies.
        block: Positions per block (0: the whole canvas; default: up to 32).
        remasking: The ranking: "confidence", "random", "margin", "entropy" or "leftmost".
        cache: "none", "prefix", "dual" or, with a model that has blocks, "block".
        ahead: How many blocks after the current one are drafted too (the paper's eager mode).
        threshold: If given (the paper's is 0.95), steps unmask every mask with at least this
            confidence (FreeDave++).
        mask: The mask token (default: the tokenizer's).
    """
    if ahead < 0:
        raise InvalidRequestError(f"ahead must be 0 or more, not {ahead}")
    if ahead and cache in ("prefix", "dual"):
        raise UnsupportedCombinationError(
            f"ahead={ahead} needs cache=none or cache=block, not cache={cache}: opening a block"
            " would change the rows of drafts beyond it"
        )
    blocks, policy = FixedBlocks(block), cache_named(cache, DRAFT_CACHES)
    if threshold is None:
        return ChainDenoiser(drafts, blocks, ranking(remasking), policy, mask, ahead)
    if not 0 <= threshold <= 1:
        raise InvalidRequestError(f"threshold must be between 0 and 1, not {threshold}")
    if remasking != "confidence":
        raise UnsupportedCombinationError(
            f"threshold needs remasking=confidence, not remasking={remasking}"
        )
    decoder = ThresholdChains(drafts, blocks, ranking(remasking), policy, mask, ahead)
    decoder.threshold = threshold
    return decoder
