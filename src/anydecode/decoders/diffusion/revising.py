"""Denoising whose tokens may change until their block is closed.

A step may unmask masks, replace tokens by others, and mask tokens again. All of this stays within
the block: its tokens are emitted when it is closed, and later blocks see them as final.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import FIXED, Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: In `Canvas.policy_state`: whether the block may be closed as soon as it holds no mask.
IS_SETTLED = "is settled"

#: A deviation of every method that revises tokens.
STATEFUL = "with constraints and other stateful samplers, tokens are unmasked only, never revised"


class RevisedBlocks(FixedBlocks):
    """`FixedBlocks` that close when they hold no mask and their tokens are final."""

    def should_close(self, canvas: Canvas) -> bool:
        return super().should_close(canvas) and bool(canvas.policy_state.get(IS_SETTLED, True))


class BlockwiseDenoiser(Denoiser):
    """Emits the tokens of a block when it is closed; the base of methods that may change them."""

    def is_complete(self, canvas: Canvas) -> bool:
        return canvas.block is None and super().is_complete(canvas)

    def emitted_stop(self, canvas: Canvas) -> int:
        stop = super().emitted_stop(canvas)
        return stop if canvas.block is None else min(stop, canvas.block[0])

    def open(self, canvas: Canvas, block: tuple[int, int]) -> None:
        """Open `block`, unless it is open."""
        if canvas.block is None:
            canvas.open(*block)
            self.unmask.on_block_opened(canvas)
            self.on_opened(canvas)

    def on_opened(self, canvas: Canvas) -> None:
        """Called when a block has been opened, before it is changed."""

    def finish_revision(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        unmasked: np.ndarray,
        remasked: np.ndarray,
        is_settled: bool,
    ) -> None:
        """Mask `remasked` again, unmask `unmasked`, and finish the step; `is_settled` says whether
        the tokens of the block are final as soon as it holds no mask."""
        canvas.policy_state[IS_SETTLED] = is_settled
        canvas.remask(remasked)
        self.commit(sequence, canvas, predictions, unmasked, remasked=remasked.tolist())

    @staticmethod
    def free_positions(canvas: Canvas) -> np.ndarray:
        """The positions of the block that hold no fixed token, ascending."""
        assert canvas.block is not None
        positions = np.arange(*canvas.block)
        result: np.ndarray = positions[canvas.committed[positions] != FIXED]
        return result


class RevisingDenoiser(BlockwiseDenoiser):
    """Predicts every position of the block in each pass, and revises the block.

    With a sampler that depends on the text before a position (a constraint, a penalty), tokens are
    unmasked only, from left to right.
    """

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        if sequence.sampler.is_stateful:
            yield from super().step(sequence, canvas)
            return
        block = canvas.block or (canvas.frontier, self.blocks.window_end(canvas))
        [predictions] = yield from self.forward(sequence, canvas, region=block)
        self.open(canvas, block)
        self.revise(sequence, canvas, predictions)

    @abstractmethod
    def revise(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        """Change the open block, given the predictions for each of its positions, and finish the
        step (`commit`)."""
