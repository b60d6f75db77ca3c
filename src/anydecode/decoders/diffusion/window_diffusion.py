"""Window-Diffusion (Zuo et al., "Window-Diffusion: Accelerating Diffusion Language Model Inference
with Windowed Token Pruning and Caching", arXiv:2601.20332).

Each pass computes only the next masks. The other masks of a larger window are cached and refreshed
periodically; masks after the window are left out.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import BlockPolicy
from anydecode.decoders.diffusion.caches import CachePolicy, uncached_span
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import RANKING_WORDS, ranking
from anydecode.decoders.diffusion.stops import EndOfText
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.decoders.framework.canvas_spans import CanvasSpan
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.spec import ModelSpec
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.span import Span


class WindowCachePolicy(CachePolicy):
    """Computes the first masks in every pass, and refreshes a larger window periodically.

    A refresh computes and keeps all rows up to the last mask of the window. It runs every `cycle`
    steps, if the length of the canvas has changed, or if the positions to predict go beyond the
    cached rows. Other passes compute the active masks and the tokens unmasked since the refresh.

    Args:
        window: The number of masks in the window.
        active: The number of masks that every pass computes.
        cycle: The number of steps between two refreshes.
    """

    needs_replay = True

    def __init__(self, window: int, active: int, cycle: int) -> None:
        if not 1 <= active <= window or cycle < 1:
            raise InvalidRequestError(
                f"window-diffusion needs 1 <= active <= window and cycle >= 1, not active={active},"
                f" window={window}, cycle={cycle}"
            )
        self.window = window
        self.active = active
        self.cycle = cycle

    def block_size(self, spec: ModelSpec) -> int | None:
        if spec.block_size is not None:
            raise UnsupportedCombinationError(
                "window-diffusion needs a diffusion model whose rows see the whole canvas; rows of"
                f" this one see blocks of {spec.block_size}"
            )
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

    def refresh_end(self, canvas: Canvas) -> int:
        """The end of a refresh: the position after the last mask of the window."""
        return int(canvas.masks[: self.window][-1]) + 1

    def record_refresh(self, canvas: Canvas, region: tuple[int, int]) -> None:
        """Record a refresh; called after the pass has run and before tokens are committed."""
        if self.is_stale(canvas, region):
            refresh_end = self.refresh_end(canvas)
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
        refresh_end = self.refresh_end(canvas)
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


class WindowedDenoiser(Denoiser):
    """Records refreshes before tokens are committed."""

    def unmask_step(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        assert isinstance(self.cache, WindowCachePolicy)
        self.cache.record_refresh(canvas, (canvas.frontier, self.blocks.window_end(canvas)))
        super().unmask_step(sequence, canvas, predictions)


class FirstMasks(BlockPolicy):
    """The positions up to the `active`-th mask, chosen again in every pass."""

    def __init__(self, active: int) -> None:
        self.active = active

    def window_end(self, canvas: Canvas) -> int:
        return int(canvas.masks[: self.active][-1]) + 1

    def should_close(self, canvas: Canvas) -> bool:
        return True


@register(
    Card(
        "window-diffusion",
        "diffusion",
        paper="Window-Diffusion (arXiv:2601.20332)",
        exactness="lossy",
        summary="Computes the next few masks, caches a window after them, leaves out the rest.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "rows are gathered by position; the released code takes a prefix of the canvas",
            "tokens unmasked since the last refresh are computed again in every pass, for all"
            " models",
            "masks after the window are also left out of refreshes",
        ),
        remote={
            "window": Range(1, 4096),
            "active": Range(1, 4096),
            "cycle": Range(1, 4096),
            "threshold": Range(0, 100),
            "remasking": RANKING_WORDS,
        },
    )
)
def window_diffusion(
    window: int = 64,
    active: int = 16,
    cycle: int = 32,
    threshold: float = 2.0,
    remasking: str = "confidence",
    mask: int | None = None,
) -> Denoiser:
    """Denoises the first masks of a cached window.

    Args:
        window: The number of masks in the window.
        active: The number of masks, from the first on, that every pass computes.
        cycle: The number of steps after which the window is refreshed.
        threshold: Masks with at least this confidence are unmasked; if there is none (as with the
            default), one mask per step.
        remasking: The ranking: "confidence", "random", "margin", "entropy" or "leftmost".
        mask: The mask token (default: the tokenizer's).
    """
    return WindowedDenoiser(
        FirstMasks(active),
        ranking(remasking),
        ThresholdUnmasking(threshold),
        WindowCachePolicy(window, active, cycle),
        EndOfText(),
        mask=mask,
    )
