"""How far a diffusion decoder looks: the stretches of the canvas filled one after another."""

from __future__ import annotations

from abc import ABC, abstractmethod

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.errors import InvalidRequestError


class BlockPolicy(ABC):
    """Opens a block at the first mask and closes it when it is full."""

    @abstractmethod
    def window(self, canvas: Canvas) -> int:
        """The end of what the pass that opens a block must predict."""

    def end(self, canvas: Canvas, predictions: Predictions) -> int:
        """The end of the block that this pass opens, at most `window`."""
        return self.window(canvas)

    def closes(self, canvas: Canvas) -> bool:
        """Whether the block ends here."""
        assert canvas.block is not None
        return not len(canvas.masked(*canvas.block))

    def check(self, length: int) -> None:  # noqa: B027  most policies fit any canvas
        """Refuse a canvas of `length` masks that the blocks do not fit on."""

    def fits(self, canvas: Canvas) -> None:  # noqa: B027  most policies fit any model
        """Refuse a model whose own blocks are others."""


class WholeCanvas(BlockPolicy):
    """The whole canvas at once."""

    def window(self, canvas: Canvas) -> int:
        return len(canvas)


class FixedBlocks(BlockPolicy):
    """Blocks of `size` positions, counted from the first mask ever (LLaDA), or from position 0
    where the model's own blocks are (`canvas.size`). None: the model's size, or up to 32; 0: the
    model's size, or the whole canvas."""

    def __init__(self, size: int | None = None) -> None:
        if size is not None and size < 0:
            raise InvalidRequestError("a block needs at least one position")
        self.size = size

    def window(self, canvas: Canvas) -> int:
        size = canvas.size or (32 if self.size is None else self.size)
        if size == 0:
            return len(canvas)
        origin = 0 if canvas.size else canvas.memory.setdefault("origin", canvas.frontier)
        past = (canvas.frontier - origin) // size
        return min(origin + (past + 1) * size, len(canvas))

    def check(self, length: int) -> None:
        if self.size is not None and self.size > length:
            raise InvalidRequestError(
                f"a block of {self.size} does not fit on a canvas of {length} (max_tokens)"
            )

    def fits(self, canvas: Canvas) -> None:
        if canvas.size and self.size and self.size != canvas.size:
            raise InvalidRequestError(
                f"this model's blocks have {canvas.size} positions; block={self.size} does not fit"
            )


class SlidingWindow(BlockPolicy):
    """Always the next `size` positions from the first mask on."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise InvalidRequestError("a window needs at least one position")
        self.size = size

    def window(self, canvas: Canvas) -> int:
        return min(canvas.frontier + self.size, len(canvas))

    def closes(self, canvas: Canvas) -> bool:
        return True
