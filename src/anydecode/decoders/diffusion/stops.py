"""Stop rules: when a diffusion decoder ends before every mask has been unmasked on its own."""

from __future__ import annotations

import numpy as np

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.predictions import Predictions


class StopRule:
    """Never stops early; the base class of all stop rules."""

    #: Whether it needs predictions outside the block, which models with blocks do not give.
    needs_all_masks = False

    def extra_positions(self, canvas: Canvas) -> np.ndarray:
        """Positions that must be predicted besides the masks of the block."""
        return np.empty(0, np.int64)

    def fills_all(self, canvas: Canvas, predictions: Predictions) -> bool:
        """Whether to unmask every predicted mask in this step; called before the commit."""
        return False

    def truncated_length(self, canvas: Canvas, predictions: Predictions) -> int | None:
        """The length to which to cut the canvas, or None to keep it; called after the commit."""
        return None


class EndOfText(StopRule):
    """Cuts the canvas after a committed end-of-text token."""

    def truncated_length(self, canvas: Canvas, predictions: Predictions) -> int | None:
        for position in np.flatnonzero(canvas.committed >= 0):
            if predictions.sequence.stops_at(int(canvas.tokens[position])):
                return int(position) + 1 if position + 1 < len(canvas) else None
        return None
