"""Cache policies that keep rows which were computed for an earlier state of the canvas.

They are approximate: a row that is not computed again does not see the tokens unmasked since.
"""

from __future__ import annotations

import numpy as np

from anydecode.decoders.diffusion.caches import CachePolicy, uncached_span
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.framework.canvas_spans import CanvasSpan
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.spec import ModelSpec
from anydecode.scoring.span import Span


class DualCachePolicy(CachePolicy):
    """Dual cache (Wu et al., Fast-dLLM, arXiv:2505.22618).

    The pass that opens a block computes every row and keeps their keys and values. Later passes
    compute only the block, against the cached rows before and after it.
    """

    needs_replay = True

    def computed_positions(self, canvas: Canvas, region: tuple[int, int]) -> np.ndarray:
        """The positions computed in a pass that does not open a block."""
        return canvas.input_positions(*region)

    def refresh_span(
        self, canvas: Canvas, kv_cache: SequenceCache, region: tuple[int, int], opens_block: bool
    ) -> CanvasSpan | None:
        if not opens_block:
            return None
        span = uncached_span(
            canvas, kv_cache, canvas.tokens, np.arange(len(canvas), dtype=np.int32)
        )
        span.keep = True
        return span

    def leading_spans(
        self, canvas: Canvas, kv_cache: SequenceCache, region: tuple[int, int], opens_block: bool
    ) -> list[Span]:
        if canvas.block is not None:  # every later pass computes these rows again
            kv_cache.evict(self.computed_positions(canvas, canvas.block).tolist())
        return []

    def span(
        self, canvas: Canvas, kv_cache: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        return uncached_span(canvas, kv_cache, tokens, self.computed_positions(canvas, region))


class PrefixCachePolicy(DualCachePolicy):
    """Prefix cache (Fast-dLLM): as the dual cache, but passes also compute all after the block."""

    def computed_positions(self, canvas: Canvas, region: tuple[int, int]) -> np.ndarray:
        return canvas.input_positions(region[0], len(canvas))


class VicinityCachePolicy(DualCachePolicy):
    """Vicinity refresh (Ma et al., dInfer, arXiv:2510.08666): as the dual cache, but passes also
    compute the positions next to the block, and the first passes of a text every row.

    Args:
        near: The number of positions on each side of the block.
        warm_up: The number of passes over every row with which a text begins.
    """

    def __init__(self, near: int = 16, warm_up: int = 4) -> None:
        self.near = near
        self.warm_up = warm_up

    def computed_positions(self, canvas: Canvas, region: tuple[int, int]) -> np.ndarray:
        first, stop = region if canvas.block is None else canvas.block
        return canvas.input_positions(max(0, first - self.near), min(stop + self.near, len(canvas)))

    def refresh_span(
        self, canvas: Canvas, kv_cache: SequenceCache, region: tuple[int, int], opens_block: bool
    ) -> CanvasSpan | None:
        is_full = opens_block or canvas.step < self.warm_up
        return super().refresh_span(canvas, kv_cache, region, is_full)


class WindowCachePolicy(CachePolicy):
    """Computes the first masks in every pass, and refreshes a larger window periodically
    (Window-Diffusion, arXiv:2601.20332).

    A refresh computes and keeps all rows up to the last mask of the window. It runs every `cycle`
    steps, if the length of the canvas has changed, or if the positions to predict go beyond the
    cached rows. Other passes compute the active masks and the tokens unmasked since the refresh.

    Args:
        window: The number of masks in the window.
        active: The number of masks that every pass computes.
        cycle: The number of steps between two refreshes.
    """

    needs_replay = True

    def __init__(self, window: int = 64, active: int = 16, cycle: int = 32) -> None:
        if not 1 <= active <= window or cycle < 1:
            raise InvalidRequestError(
                f"a cached window needs 1 <= active <= window and cycle >= 1, not active={active},"
                f" window={window}, cycle={cycle}"
            )
        self.window = window
        self.active = active
        self.cycle = cycle

    def block_size(self, spec: ModelSpec) -> int | None:
        _refuse_blocks(spec)
        return None

    def is_stale(self, canvas: Canvas, region: tuple[int, int]) -> bool:
        """Whether the next pass must refresh the cached rows."""
        state = canvas.policy_state.get("window")
        return (
            state is None
            or canvas.step >= state["step"] + self.cycle
            or region[1] > state["end"]
            or len(canvas) != state["length"]
        )

    def on_replaced(self, canvas: Canvas) -> None:
        canvas.policy_state.pop("window", None)

    def refresh_end(self, canvas: Canvas, region: tuple[int, int]) -> int:
        """The end of a refresh: the position after the last mask of the window."""
        return max(int(canvas.masks[: self.window][-1]) + 1, region[1])

    def on_pass(self, canvas: Canvas, region: tuple[int, int]) -> None:
        if self.is_stale(canvas, region):
            refresh_end = self.refresh_end(canvas, region)
            canvas.policy_state["window"] = {
                "step": canvas.step,
                "end": refresh_end,
                "length": len(canvas),
            }

    def refresh_span(
        self, canvas: Canvas, kv_cache: SequenceCache, region: tuple[int, int], opens_block: bool
    ) -> CanvasSpan | None:
        if not self.is_stale(canvas, region):
            return None
        refresh_end = self.refresh_end(canvas, region)
        kv_cache.truncate(min(kv_cache.length, refresh_end))
        span = uncached_span(
            canvas, kv_cache, canvas.tokens, np.arange(refresh_end, dtype=np.int32)
        )
        span.visible, span.keep = np.full(refresh_end, refresh_end, np.int32), True
        return span

    def span(
        self, canvas: Canvas, kv_cache: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        state = canvas.policy_state["window"]
        refresh_end = state["end"]
        unmasked = np.flatnonzero(canvas.committed[:refresh_end] >= state["step"])
        positions = np.union1d(unmasked, canvas.input_positions(*region)).astype(np.int32)
        span = uncached_span(canvas, kv_cache, tokens, positions)
        span.visible = np.full(len(positions), refresh_end, np.int32)
        return span


class RecentCachePolicy(CachePolicy):
    """Keeps the rows of tokens that left a window (Israel et al., APD, arXiv:2506.00413).

    A pass computes the masks to predict, the tokens unmasked since the last pass, and the
    `recent` - 1 tokens before these. All other rows before them are those of the pass that computed
    them last; masks after them are left out.

    Args:
        recent: The number of tokens.
    """

    needs_replay = True

    def __init__(self, recent: int) -> None:
        if recent < 1:
            raise InvalidRequestError(f"recent must be at least 1, not {recent}")
        self.recent = recent

    def block_size(self, spec: ModelSpec) -> int | None:
        _refuse_blocks(spec)
        return None

    def on_pass(self, canvas: Canvas, region: tuple[int, int]) -> None:
        canvas.policy_state["recent"] = region[0]

    def span(
        self, canvas: Canvas, kv_cache: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        last = canvas.policy_state.get("recent")
        first = 0 if last is None else max(0, last - self.recent + 1)
        kv_cache.truncate(min(first, kv_cache.length))
        span = uncached_span(canvas, kv_cache, tokens, np.arange(first, region[1], dtype=np.int32))
        span.visible, span.keep = np.full(len(span), region[1], np.int32), True
        return span


def _refuse_blocks(spec: ModelSpec) -> None:
    if spec.block_size is not None:
        raise UnsupportedCombinationError(
            "a cached window needs a diffusion model whose rows see the whole canvas; rows of"
            f" this one see blocks of {spec.block_size}"
        )
