"""Cache policies: which rows a forward pass computes, and which come from the key-value cache.

Those of this file are exact; those in `approximate_caches.py` are not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.framework.canvas_spans import CanvasSpan, canvas_span, causal_span
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import CANVAS
from anydecode.memory.pool import KVPool
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.spec import ModelSpec
from anydecode.scoring.score import ScoreRequest, Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.span import ChainSpan, Span

#: Returns input embeddings for positions, float32 `[rows, hidden_size]`; None: use their tokens.
EmbedPositions = Callable[[np.ndarray], np.ndarray | None]


class CachePolicy(ABC):
    """Chooses the rows of a forward pass; the base class of all cache policies.

    The rows in the cache are those that earlier passes of this policy kept there. If
    `needs_replay`, these passes are recorded in `canvas.cached_rows` and run again after a restart.
    """

    #: The kind of model that the policy works with, as `Requirements.causal`.
    causal: bool | None = False
    #: Whether cached rows depend on earlier states of the canvas.
    needs_replay = False
    #: Whether the cache holds the finished blocks, exactly, and passes compute the open one only.
    is_exact_blocks = False
    #: Whether the policy reads the model's weights.
    reads_weights = False

    def block_size(self, spec: ModelSpec) -> int | None:
        """The size of the blocks in which rows see each other; by default the model's own."""
        return spec.block_size

    def check(self, pool: KVPool) -> None:  # noqa: B027  most policies fit any memory
        """Raise `UnsupportedCombinationError` if the policy cannot work with the cache of `pool` or
        its model."""

    def begin(self, canvas: Canvas, kv_cache: SequenceCache) -> None:
        """Prepare the cache when the decoder starts or restarts; by default, clear it."""
        kv_cache.truncate(0)

    @abstractmethod
    def span(
        self, canvas: Canvas, kv_cache: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        """The rows that predict the positions `region` of a canvas of `tokens`, using the cache.

        Called once per canvas if a pass scores several.
        """

    def leading_spans(
        self, canvas: Canvas, kv_cache: SequenceCache, region: tuple[int, int], opens_block: bool
    ) -> list[Span]:
        """Spans to compute and keep first, in the same pass.

        `opens_block` is True if this pass opens a block.
        """
        return []

    def refresh_span(
        self, canvas: Canvas, kv_cache: SequenceCache, region: tuple[int, int], opens_block: bool
    ) -> CanvasSpan | None:
        """The span of a pass that refreshes the cache and also predicts `region`.

        None if the next pass does not refresh the cache.
        """
        return None

    def on_pass(self, canvas: Canvas, region: tuple[int, int]) -> None:  # noqa: B027  most keep nothing
        """Called when a pass over `region` has run."""

    def on_replaced(self, canvas: Canvas) -> None:  # noqa: B027  most keep nothing
        """Called when tokens before the last mask have been replaced by others, between two
        blocks."""

    def run(
        self, sequence: Sequence, canvas: Canvas, positions: np.ndarray
    ) -> Generator[ScoreRequest, Scores, Scores] | None:
        """The passes of a step that predicts `positions`, for a policy that runs them itself and
        counts them; None for one that gives the spans of one pass."""
        return None

    def trace_fields(self, canvas: Canvas) -> dict[str, Any]:
        """What is added to the trace record of a step."""
        return {}

    def spans(
        self,
        canvas: Canvas,
        kv_cache: SequenceCache,
        region: tuple[int, int],
        opens_block: bool,
        embed: EmbedPositions,
        canvases: list[np.ndarray] | None = None,
    ) -> list[Span]:
        """All spans of a pass; the last ones return logits, one for each of `canvases`
        (default: the canvas itself)."""
        refresh = self.refresh_span(canvas, kv_cache, region, opens_block)
        if refresh is not None:
            if canvases is not None:
                raise ValueError("a pass that refreshes the cache scores one canvas only")
            refresh.inputs = embed(refresh.positions)
            return [refresh]
        spans = self.leading_spans(canvas, kv_cache, region, opens_block)
        for tokens in [canvas.tokens] if canvases is None else canvases:
            span = self.span(canvas, kv_cache, tokens, region)
            if isinstance(span, CanvasSpan):
                span.inputs = embed(span.positions)
            spans.append(span)
        return spans


def uncached_span(
    canvas: Canvas, kv_cache: SequenceCache, tokens: np.ndarray, positions: np.ndarray
) -> CanvasSpan:
    """A span of `positions` of a canvas of `tokens`, with the model's attention mask; not kept."""
    return canvas_span(kv_cache, positions, tokens[positions], canvas.visible(positions))


class NoCache(CachePolicy):
    """No cache: every pass computes every row of the canvas."""

    def span(
        self, canvas: Canvas, kv_cache: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        last = np.array([region[1] - 1], np.int32)
        return uncached_span(
            canvas, kv_cache, tokens, canvas.input_positions(0, int(canvas.visible(last)[0]))
        )


#: Deviations from the papers of the methods that use `BlockCausalCache`.
DEVIATIONS = (
    "the pass that opens a block also caches the finished one, which saves one pass per block",
    "all blocks of the prompt are prefilled in one pass",
)


class BlockCausalCache(CachePolicy):
    """Keeps finished blocks for good (Arriola et al., BD3-LM, arXiv:2503.09573).

    This is exact, as rows see only their own block and the blocks before it. The pass that opens a
    block computes the finished block before it once more, now without masks, and keeps it.

    Args:
        block_size: The block size for a model whose files name none.
    """

    is_exact_blocks = True

    def __init__(self, block_size: int | None = None) -> None:
        if block_size is not None and block_size < 1:
            raise InvalidRequestError(
                f"a block needs at least one position, not block={block_size}"
            )
        self._size = block_size

    def block_size(self, spec: ModelSpec) -> int | None:
        size = self._size or spec.block_size
        if size is None:
            raise InvalidRequestError(
                "this model's files name no block size: open it with block=POSITIONS (--block), or"
                " use a decoder for models without blocks"
            )
        return size

    def num_finished(self, canvas: Canvas, kv_cache: SequenceCache) -> int:
        """How many positions have cached rows that stay."""
        return kv_cache.length

    def leading_spans(
        self, canvas: Canvas, kv_cache: SequenceCache, region: tuple[int, int], opens_block: bool
    ) -> list[Span]:
        spans: list[Span] = []
        start, stop = self.num_finished(canvas, kv_cache), canvas.block_start(region[0])
        while start < stop:
            end = canvas.block_end(start)
            positions = np.arange(start, end, dtype=np.int32)
            span = uncached_span(canvas, kv_cache, canvas.tokens, positions)
            span.keep = True
            spans.append(span)
            start = end
        return spans

    def span(
        self, canvas: Canvas, kv_cache: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        first = max(0, canvas.block_start(region[0]))
        stop = int(canvas.visible(np.array([region[1] - 1]))[0])
        span = uncached_span(canvas, kv_cache, tokens, canvas.input_positions(first, stop))
        if kv_cache.pool.model.spec.has_canvas:
            span.variant, span.windowed_from = CANVAS, first
        return span


class CausalCache(CachePolicy):
    """The cache of causal diffusion models (Liu et al., WeDLM, arXiv:2512.22737).

    Rows before the first mask are kept for good. After them a pass computes first the unmasked and
    then the masked positions of the window. Each row sees those before it in this order; rotary
    embeddings use the true positions.
    """

    causal = True

    def block_size(self, spec: ModelSpec) -> int | None:
        return None

    def begin(self, canvas: Canvas, kv_cache: SequenceCache) -> None:
        length = min(len(kv_cache.tokens), kv_cache.length, canvas.frontier)
        differs = np.flatnonzero(np.array(kv_cache.tokens[:length]) != canvas.tokens[:length])
        kv_cache.truncate(int(differs[0]) if len(differs) else length)

    def leading_spans(
        self, canvas: Canvas, kv_cache: SequenceCache, region: tuple[int, int], opens_block: bool
    ) -> list[Span]:
        new_tokens = canvas.tokens[kv_cache.length : canvas.frontier].tolist()
        num_layers = kv_cache.pool.model.spec.num_layers
        return [ChainSpan(kv_cache, new_tokens, 0, num_layers)] if new_tokens else []

    def span(
        self, canvas: Canvas, kv_cache: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        positions = np.arange(canvas.frontier, region[1], dtype=np.int32)
        masked = tokens[positions] == canvas.mask
        positions = np.concatenate([positions[~masked], positions[masked]])
        return causal_span(kv_cache, positions, tokens[positions])
