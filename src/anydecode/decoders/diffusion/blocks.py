"""Block policies: which part of the canvas is unmasked at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.errors import InvalidRequestError


class BlockPolicy(ABC):
    """Opens a block at the first mask and closes it when it holds no mask."""

    @abstractmethod
    def window_end(self, canvas: Canvas) -> int:
        """The end of the positions that the pass which opens a block must predict."""

    def block_end(self, canvas: Canvas, predictions: Predictions) -> int:
        """The end of the block that this pass opens, at most `window_end`."""
        return self.window_end(canvas)

    def logit_shift(self, canvas: Canvas) -> int:
        """The shift of the rows that predict the positions of the next pass."""
        return canvas.logit_shift

    def should_close(self, canvas: Canvas) -> bool:
        """Whether to close the block after this step."""
        assert canvas.block is not None
        return not len(canvas.masked(*canvas.block))

    def check_length(self, length: int) -> None:  # noqa: B027  most policies fit any canvas
        """Raise `InvalidRequestError` if the blocks do not fit on a canvas of `length` masks."""

    def check_model(self, block_size: int | None) -> None:  # noqa: B027  most fit any model
        """Raise `InvalidRequestError` if the model has blocks of another size, `block_size`."""


class WholeCanvas(BlockPolicy):
    """The whole canvas is one block."""

    def window_end(self, canvas: Canvas) -> int:
        return len(canvas)


class FixedBlocks(BlockPolicy):
    """Blocks of a fixed size.

    They are counted from the first mask of the canvas (LLaDA); if the model has blocks of its own
    (`canvas.block_size`), they are these.

    Args:
        size: Positions per block. None: the model's block size, or up to 32. 0: the model's block
            size, or the whole canvas.
    """

    def __init__(self, size: int | None = None) -> None:
        if size is not None and size < 0:
            raise InvalidRequestError(f"a block needs at least one position, not {size}")
        self.size = size

    def window_end(self, canvas: Canvas) -> int:
        return self.end_of_block(canvas, canvas.frontier)

    def end_of_block(self, canvas: Canvas, position: int) -> int:
        """The end of the block that `position` is in, at or after the first mask."""
        size = canvas.block_size or (32 if self.size is None else self.size)
        if size == 0:
            return len(canvas)
        origin = (
            canvas.origin
            if canvas.block_size
            else canvas.policy_state.setdefault("origin", canvas.frontier)
        )
        index = (position - origin) // size
        return min(origin + (index + 1) * size, len(canvas))

    def check_length(self, length: int) -> None:
        if self.size is not None and self.size > length:
            raise InvalidRequestError(
                f"a block of {self.size} does not fit on a canvas of {length} (max_tokens)"
            )

    def check_model(self, block_size: int | None) -> None:
        if block_size and self.size and self.size != block_size:
            raise InvalidRequestError(
                f"this model's blocks have {block_size} positions; block={self.size} does not fit"
            )


class LargestBlocks(FixedBlocks):
    """`FixedBlocks` whose size is a bound: a canvas may be shorter, and the blocks of a model take
    their place."""

    def check_length(self, length: int) -> None:
        pass

    def check_model(self, block_size: int | None) -> None:
        pass


class SlidingWindow(BlockPolicy):
    """In every pass, the next `size` positions from the first mask on."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise InvalidRequestError(f"a window needs at least one position, not {size}")
        self.size = size

    def window_end(self, canvas: Canvas) -> int:
        return min(canvas.frontier + self.size, len(canvas))

    def should_close(self, canvas: Canvas) -> bool:
        return True
