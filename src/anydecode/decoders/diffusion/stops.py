"""When a diffusion decoder stops before every mask has had its turn."""

from __future__ import annotations

import numpy as np

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.predictions import Predictions


class StopRule:
    """Never stops early: the rule of a decoder that fills every mask."""

    def wants(self, canvas: Canvas) -> np.ndarray:
        """Masks that must be predicted besides the block's."""
        return np.empty(0, np.int64)

    def fills(self, canvas: Canvas, predictions: Predictions) -> bool:
        """Asked before anything is committed: whether every mask that was predicted gets its token
        now."""
        return False

    def cut(self, canvas: Canvas, predictions: Predictions) -> int | None:
        """Asked after the commit: the length to which the canvas shrinks, or None."""
        return None


class EndOfText(StopRule):
    """Drops what stands behind a committed end of text."""

    def cut(self, canvas: Canvas, predictions: Predictions) -> int | None:
        for position in np.flatnonzero(canvas.committed >= 0):
            if predictions.sequence.stops_at(int(canvas.tokens[position])):
                return int(position) + 1 if position + 1 < len(canvas) else None
        return None
