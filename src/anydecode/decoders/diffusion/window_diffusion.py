"""Only the next masks are computed, those behind them are remembered, the rest does not exist yet
(Zuo et al., "Window-Diffusion: Accelerating Diffusion Language Model Inference with Windowed Token
Pruning and Caching", arXiv:2601.20332)."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import BlockPolicy
from anydecode.decoders.diffusion.caches import CachePolicy, rows
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.canvas_spans import CanvasSpan
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import ranking
from anydecode.decoders.diffusion.stops import EndOfText
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.errors import InvalidRequestError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.spec import ModelSpec
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.span import Span


class Windowed(CachePolicy):
    """Every `cycle` steps, and behind a cut, all rows up to the end of a window of `window` masks
    are computed and kept; between, the `active` first masks and what was written since. The window
    and the active masks are chosen anew in every pass."""

    replays = True

    def __init__(self, window: int, active: int, cycle: int) -> None:
        if not 1 <= active <= window or cycle < 1:
            raise InvalidRequestError(
                "a window needs 1 <= active <= window, and a cycle of 1 or more"
            )
        self.window = window
        self.active = active
        self.cycle = cycle

    def size(self, spec: ModelSpec) -> int | None:
        return None

    def is_stale(self, canvas: Canvas, region: tuple[int, int]) -> bool:
        """Whether the next pass refreshes what is kept."""
        held = canvas.memory.get("window")
        return (
            held is None
            or canvas.step >= held["step"] + self.cycle
            or region[1] > held["end"]
            or len(canvas) != held["length"]
        )

    def end(self, canvas: Canvas) -> int:
        """Where a refresh ends: behind the last mask of the window."""
        return int(canvas.masks[: self.window][-1]) + 1

    def refreshed(self, canvas: Canvas, region: tuple[int, int]) -> None:
        """The pass that was asked for has run, and nothing is committed yet."""
        if self.is_stale(canvas, region):
            end = self.end(canvas)
            canvas.memory["window"] = {"step": canvas.step, "end": end, "length": len(canvas)}

    def renew(
        self, canvas: Canvas, context: SequenceCache, region: tuple[int, int], opening: bool
    ) -> CanvasSpan | None:
        if not self.is_stale(canvas, region):
            return None
        end = self.end(canvas)
        context.truncate(min(context.length, end))
        span = rows(canvas, context, canvas.tokens, np.arange(end, dtype=np.int32))
        span.visible, span.keep = np.full(end, end, np.int32), True
        return span

    def span(
        self, canvas: Canvas, context: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        held = canvas.memory["window"]
        end = held["end"]
        fresh = np.flatnonzero(canvas.committed[:end] >= held["step"])
        positions = np.union1d(fresh, canvas.slice(*region)).astype(np.int32)
        span = rows(canvas, context, tokens, positions)
        span.visible = np.full(len(positions), end, np.int32)
        return span


class WindowedDenoiser(Denoiser):
    """Keeps account of refreshes."""

    def fill(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        assert isinstance(self.cache, Windowed)
        self.cache.refreshed(canvas, (canvas.frontier, self.blocks.window(canvas)))
        super().fill(sequence, canvas, predictions)


class FirstMasks(BlockPolicy):
    """The stretch up to the `active`-th mask, chosen anew in every pass."""

    def __init__(self, active: int) -> None:
        self.active = active

    def window(self, canvas: Canvas) -> int:
        return int(canvas.masks[: self.active][-1]) + 1

    def closes(self, canvas: Canvas) -> bool:
        return True


@register(
    Card(
        "window-diffusion",
        "diffusion",
        paper="Window-Diffusion (arXiv:2601.20332)",
        exactness="lossy",
        summary="Computes the next few masks, remembers a window behind them, ignores the rest.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "rows are gathered by position, where the released code slices a prefix",
            "rows written since the last refresh are computed again in every pass, for all models",
            "what is far is left out of refreshes, too",
        ),
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
    """Of a `window` of masks the first `active` are computed in every pass, the others every
    `cycle` passes. Commits one token a pass, or all of at least `threshold`."""
    return WindowedDenoiser(
        FirstMasks(active),
        ranking(remasking),
        ThresholdUnmasking(threshold),
        Windowed(window, active, cycle),
        EndOfText(),
        mask=mask,
    )
