"""Window-Diffusion (Zuo et al., "Window-Diffusion: Accelerating Diffusion Language Model Inference
with Windowed Token Pruning and Caching", arXiv:2601.20332).

Each pass computes only the next masks. The other masks of a larger window are cached and refreshed
periodically; masks after the window are left out.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.approximate_caches import WindowCachePolicy
from anydecode.decoders.diffusion.blocks import BlockPolicy
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.rankings import RANKING_WORDS, ranking
from anydecode.decoders.diffusion.stops import EndOfText
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking


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
    return Denoiser(
        FirstMasks(active),
        ranking(remasking),
        ThresholdUnmasking(threshold),
        WindowCachePolicy(window, active, cycle),
        EndOfText(),
        mask=mask,
    )
