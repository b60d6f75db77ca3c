"""Fast-dLLM v2: blocks over an exact cache, each filled in sub-blocks from left to right (Wu et
al., "Fast-dLLM v2: Efficient Block-Diffusion LLM", arXiv:2509.26328).

The model's logits are shifted, so the first token of a block is predicted before the block, by the
last row of the finished one. Within a block, each step unmasks the confident masks of the first
sub-block that has masks; optionally it computes the rows of that sub-block only.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.blocks import BlockPolicy
from anydecode.decoders.diffusion.caches import DEVIATIONS, BlockCausalCache, uncached_span
from anydecode.decoders.diffusion.canvas import MASKED, Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.unmasking import ThresholdOrSchedule, TopKUnmasking
from anydecode.errors import InvalidRequestError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.span import Span

CACHES = ("none", "dual")


class SubBlocks(BlockPolicy):
    """Parts of the model's blocks, from left to right.

    With shifted logits, the first position of a block is a part of its own: a row of the block
    before it predicts it.

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

    def start(self, canvas: Canvas, position: int) -> int:
        """The first position of the part that `position` is in."""
        start = canvas.block_start(position)
        return start + (position - start) // self.size * self.size


def is_first_of_block(canvas: Canvas, position: int) -> bool:
    """Whether a row of the block before predicts `position`."""
    return canvas.logit_shift > 0 and position == canvas.block_start(position) > 0


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


@register(
    Card(
        "fast-dllm-v2",
        "diffusion",
        paper="Fast-dLLM v2: Efficient Block-Diffusion LLM (arXiv:2509.26328)",
        exactness="lossy",
        summary="Blocks over an exact cache, filled in sub-blocks above a threshold.",
        needs=("block-diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            *DEVIATIONS,
            "with logits in place, the first position of a block is predicted like the others",
        ),
        remote={
            "block": Range(1, 4096),
            "sub_block": Range(1, 4096),
            "threshold": Range(0, 1),
            "cache": Words(CACHES),
        },
    )
)
def fast_dllm_v2(
    block: int | None = None,
    sub_block: int = 8,
    threshold: float = 0.95,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises block by block, and each block in sub-blocks from the left.

    Args:
        block: Positions per block (default: the model's own block size).
        sub_block: Positions per sub-block.
        threshold: In every step, the masks of the sub-block with more confidence are unmasked, at
            least the best one.
        cache: "none" computes the rows of the block in every step; "dual" those of the sub-block,
            against the older rows of the others, once its first position is unmasked.
        mask: The mask token (default: the tokenizer's).
    """
    if not 0 <= threshold <= 1:
        raise InvalidRequestError(f"threshold must be between 0 and 1, not {threshold}")
    if cache not in CACHES:
        raise InvalidRequestError(f"cache={cache!r} is unknown; it must be one of none, dual")
    parts = SubBlocks(sub_block)
    rows = SubBlockCache(block, parts) if cache == "dual" else SeededCache(block)
    unmask = ThresholdOrSchedule(threshold, TopKUnmasking())
    return Denoiser(parts, unmask=unmask, cache=rows, mask=mask, tempered=True)
