"""What a diffusion decoder computes anew in a pass, and what it takes from earlier ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.canvas_spans import CanvasSpan, canvas_span, causal_span
from anydecode.errors import UnsupportedCombinationError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.spec import ModelSpec
from anydecode.scoring.span import ChainSpan, Span

#: Soft inputs of rows: float32 `[rows, hidden_size]` for some places, or None for their tokens.
Embed = Callable[[np.ndarray], torch.Tensor | None]


class CachePolicy(ABC):
    """Chooses the rows of a pass.

    `held` rows of the context are whatever this policy kept there. Passes that keep rows are noted
    in `canvas.kept` and computed again after a restart, where `replays` says so.
    """

    #: The kind of model it is for, as `Decoder.causal`.
    causal: bool | None = False
    #: Whether what it keeps depends on canvases that are gone.
    replays = False

    def size(self, spec: ModelSpec) -> int | None:
        """The size of the blocks in which rows see each other: the model's own."""
        return spec.block_size

    def begin(self, canvas: Canvas, context: SequenceCache) -> None:
        """The decoder starts, or starts again: forget what the context holds of others."""
        context.truncate(0)

    @abstractmethod
    def span(
        self, canvas: Canvas, context: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        """The rows that predict `region` of a canvas of `tokens`, from what is kept. It is asked
        once per canvas, where several are looked at in one pass."""

    def before(
        self, canvas: Canvas, context: SequenceCache, region: tuple[int, int], opening: bool
    ) -> list[Span]:
        """What must be kept first, in the same pass. `opening`: this pass opens a block."""
        return []

    def renew(
        self, canvas: Canvas, context: SequenceCache, region: tuple[int, int], opening: bool
    ) -> CanvasSpan | None:
        """All rows of a pass that computes what is kept anew, and predicts `region` besides; None
        where the next pass is no such pass."""
        return None

    def spans(
        self,
        canvas: Canvas,
        context: SequenceCache,
        region: tuple[int, int],
        opening: bool,
        embed: Embed,
        canvases: list[np.ndarray] | None = None,
    ) -> list[Span]:
        """All rows of a pass; those that answer stand last, one span for each of `canvases`
        (default: the canvas itself)."""
        anew = self.renew(canvas, context, region, opening)
        if anew is not None:
            if canvases is not None:
                raise ValueError("a pass that renews what is kept looks at one canvas")
            anew.inputs = embed(anew.positions)
            return [anew]
        spans = self.before(canvas, context, region, opening)
        for tokens in [canvas.tokens] if canvases is None else canvases:
            span = self.span(canvas, context, tokens, region)
            if isinstance(span, CanvasSpan):
                span.inputs = embed(span.positions)
            spans.append(span)
        return spans


def rows(
    canvas: Canvas, context: SequenceCache, tokens: np.ndarray, positions: np.ndarray
) -> CanvasSpan:
    """Rows at `positions` of a canvas of `tokens`, seeing what the model lets them; not kept."""
    return canvas_span(context, positions, tokens[positions], canvas.visible(positions))


class NoCache(CachePolicy):
    """Every row of the canvas in every pass."""

    def span(
        self, canvas: Canvas, context: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        last = np.array([region[1] - 1], np.int32)
        return rows(canvas, context, tokens, canvas.slice(0, int(canvas.visible(last)[0])))


class DualCachePolicy(CachePolicy):
    """A full pass opens a block and is kept; the further ones compute the block alone and see the
    rest as it was then (Wu et al., Fast-dLLM, arXiv:2505.22618)."""

    replays = True

    def slice(self, canvas: Canvas, region: tuple[int, int]) -> np.ndarray:
        """The rows of a pass that opens no block."""
        return canvas.slice(*region)

    def renew(
        self, canvas: Canvas, context: SequenceCache, region: tuple[int, int], opening: bool
    ) -> CanvasSpan | None:
        if not opening:
            return None
        span = rows(canvas, context, canvas.tokens, np.arange(len(canvas), dtype=np.int32))
        span.keep = True
        return span

    def before(
        self, canvas: Canvas, context: SequenceCache, region: tuple[int, int], opening: bool
    ) -> list[Span]:
        if canvas.block is not None:  # computed in every pass from here on: nobody sees these
            context.evict(self.slice(canvas, canvas.block).tolist())
        return []

    def span(
        self, canvas: Canvas, context: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        return rows(canvas, context, tokens, self.slice(canvas, region))


class PrefixCachePolicy(DualCachePolicy):
    """The same, but everything behind the block's beginning is computed in every pass."""

    def slice(self, canvas: Canvas, region: tuple[int, int]) -> np.ndarray:
        return canvas.slice(region[0], len(canvas))


class BlockCausalCache(CachePolicy):
    """Finished blocks are kept, and are final: exact where rows see their own block and those
    before (Arriola et al., BD3-LM, arXiv:2503.09573). A finished block is computed once more, clean
    of masks, in the pass that opens the next one. `size` imposes blocks on a model that has none.
    """

    def __init__(self, size: int | None = None) -> None:
        self._size = size

    def size(self, spec: ModelSpec) -> int | None:
        return self._size or spec.block_size or 4

    def before(
        self, canvas: Canvas, context: SequenceCache, region: tuple[int, int], opening: bool
    ) -> list[Span]:
        size = canvas.size
        assert size is not None
        spans: list[Span] = []
        for start in range(context.length, region[0] // size * size, size):
            positions = np.arange(start, start + size, dtype=np.int32)
            span = rows(canvas, context, canvas.tokens, positions)
            span.keep = True
            spans.append(span)
        return spans

    def span(
        self, canvas: Canvas, context: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        size = canvas.size
        assert size is not None
        first, stop = region[0] // size * size, int(canvas.visible(np.array([region[1] - 1]))[0])
        return rows(canvas, context, tokens, canvas.slice(first, stop))


class CausalCache(CachePolicy):
    """For causal models: what stands before the first mask is kept, and is final. Behind it come
    the filled positions of the window and then its masks, each seeing those before it in this
    order, at their true positions (Liu et al., WeDLM, arXiv:2512.22737)."""

    causal = True

    def size(self, spec: ModelSpec) -> int | None:
        return None

    def begin(self, canvas: Canvas, context: SequenceCache) -> None:
        held = min(len(context.tokens), context.length, canvas.frontier)
        differs = np.flatnonzero(np.array(context.tokens[:held]) != canvas.tokens[:held])
        context.truncate(int(differs[0]) if len(differs) else held)

    def before(
        self, canvas: Canvas, context: SequenceCache, region: tuple[int, int], opening: bool
    ) -> list[Span]:
        fresh = canvas.tokens[context.length : canvas.frontier].tolist()
        depth = context.pool.model.spec.num_layers
        return [ChainSpan(context, fresh, 0, depth)] if fresh else []

    def span(
        self, canvas: Canvas, context: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        positions = np.arange(canvas.frontier, region[1], dtype=np.int32)
        masked = tokens[positions] == canvas.mask
        positions = np.concatenate([positions[~masked], positions[masked]])
        return causal_span(context, positions, tokens[positions])


CACHES: dict[str, type[CachePolicy]] = {
    "none": NoCache,
    "prefix": PrefixCachePolicy,
    "dual": DualCachePolicy,
}


def cache(name: str) -> CachePolicy:
    """The cache a user named. Raises `UnsupportedCombinationError`."""
    if name not in CACHES:
        raise UnsupportedCombinationError(f"cache is {', '.join(CACHES)}; {name!r} is none of them")
    return CACHES[name]()
