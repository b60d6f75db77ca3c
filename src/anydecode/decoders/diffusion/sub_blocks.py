"""Sub-blocks (Wu et al., Fast-dLLM v2, arXiv:2509.26328): the blocks of a model are filled in parts
from left to right. And the caches of their rows."""

from __future__ import annotations

import numpy as np

from anydecode.decoders.diffusion.blocks import BlockPolicy
from anydecode.decoders.diffusion.caches import BlockCausalCache, uncached_span
from anydecode.decoders.diffusion.canvas import MASKED, Canvas
from anydecode.errors import InvalidRequestError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.span import Span


class SubBlocks(BlockPolicy):
    """Parts of the model's blocks, from left to right.

    With shifted logits, and behind a context that predicts next tokens, the first position of a
    block is a part of its own: a row before the block predicts it.

    Args:
        size: Positions per part.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise InvalidRequestError(f"a sub-block needs at least one position, not {size}")
        self.size = size

    def window_end(self, canvas: Canvas) -> int:
        first = canvas.frontier
        if is_first_of_block(canvas, first):
            return first + 1
        start = self.start(canvas, first)
        return min(start + self.size, canvas.block_end(first), len(canvas))

    def logit_shift(self, canvas: Canvas) -> int:
        return shift_of_rows(canvas)

    def start(self, canvas: Canvas, position: int) -> int:
        """The first position of the part that `position` is in."""
        start = canvas.block_start(position)
        return start + (position - start) // self.size * self.size


def is_first_of_block(canvas: Canvas, position: int) -> bool:
    """Whether the row before the block predicts `position`."""
    has_row = canvas.logit_shift > 0 or canvas.context_predicts_next
    return has_row and position == canvas.block_start(position) > 0


def shift_of_rows(canvas: Canvas) -> int:
    """`BlockPolicy.logit_shift` of policies that predict the first position of a block alone."""
    return 1 if is_first_of_block(canvas, canvas.frontier) else canvas.logit_shift


class SeededCache(BlockCausalCache):
    """`BlockCausalCache`; for the first position of a block it computes the row that predicts it
    only."""

    def span(
        self, canvas: Canvas, kv_cache: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        if is_first_of_block(canvas, region[0]):
            row = np.array([region[0] - 1], np.int32)
            return uncached_span(canvas, kv_cache, tokens, row)
        return super().span(canvas, kv_cache, tokens, region)


class SubBlockCache(SeededCache):
    """`SeededCache` that also keeps the rows of the block that is being unmasked.

    All of them are computed if none is kept, or if the first position of the sub-block is masked;
    else those of the sub-block, which are kept in place of the older ones.
    """

    needs_replay = True

    def __init__(self, block_size: int | None, parts: SubBlocks) -> None:
        super().__init__(block_size)
        self.parts = parts

    def num_finished(self, canvas: Canvas, kv_cache: SequenceCache) -> int:
        ends = [
            int(positions[-1]) + 1
            for positions, tokens, _ in canvas.cached_rows
            if canvas.mask not in tokens
        ]
        return max(ends, default=0)

    def span(
        self, canvas: Canvas, kv_cache: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        if is_first_of_block(canvas, region[0]):
            return super().span(canvas, kv_cache, tokens, region)
        first, stop = canvas.block_start(region[0]), canvas.block_end(region[0])
        start = self.parts.start(canvas, region[0])
        if kv_cache.length > first and canvas.committed[start] != MASKED:
            first, stop = start, min(start + self.parts.size, stop)
        positions = np.arange(first, min(stop, len(canvas)), dtype=np.int32)
        span = uncached_span(canvas, kv_cache, tokens, positions)
        span.keep = True
        return span
