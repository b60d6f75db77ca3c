"""Whole-canvas decoding in log-many passes, with the end of text held back (Yang et al., "Taming
Masked Diffusion Language Models via Consistency Trajectory Reinforcement Learning with Fewer
Decoding Step", arXiv:2509.23924): EOS early rejection and the ascending step-size schedule."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import BlockPolicy, WholeCanvas
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.unmasking import TopKUnmasking, UnmaskPolicy, best
from anydecode.errors import InvalidRequestError


def num_steps(length: int) -> int:
    """Passes of the ascending schedule: floor(log2 length), at least one."""
    return max(1, length.bit_length() - 1)


class Ascending(UnmaskPolicy):
    """2^i masks in pass i of the canvas, all that are left in the last one of `num_steps`."""

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        total = canvas.memory.setdefault("masks", len(canvas.masks))
        if canvas.step >= num_steps(total) - 1 and canvas.block[1] == len(canvas):  # type: ignore[index]
            return np.ones(len(positions), bool)
        return best(ranks, 1 << canvas.step)


class PeeledPowers(BlockPolicy):
    """`count` blocks: the largest powers of two that fit are peeled off the end one by one, so that
    each but the first, which takes what is left, is filled in one pass."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise InvalidRequestError("there must be at least one block")
        self.count = count

    def window(self, canvas: Canvas) -> int:
        ends = canvas.memory.setdefault("ends", self._ends(canvas.frontier, len(canvas)))
        return int(next(end for end in ends if end > canvas.frontier))

    def _ends(self, first: int, stop: int) -> list[int]:
        """The end of every block, ascending."""
        left, ends = stop - first, [stop]
        step = num_steps(left) - 1  # the pass that fills the last block
        total = left
        while len(ends) < self.count and step > 0:
            size = total - (1 << step) + 1 if len(ends) == 1 else 1 << step
            left -= size
            ends.append(first + left)
            step -= 1
        return ends[::-1]


class RejectedEnds(Confidence):
    """Confidence; that of an end of text is multiplied by a factor that grows from `least` to 1
    with progress: by the share of passes done, under the ascending schedule (2^(i+1) - 1) / 2^S."""

    def __init__(self, least: float, *, ascending: bool) -> None:
        if not 0 <= least <= 1:
            raise InvalidRequestError("the least factor of an end of text is between 0 and 1")
        self.least = least
        self.ascending = ascending

    def rank(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        ranks = super().rank(canvas, predictions, positions)
        ends = [
            predictions.sequence.stops_at(predictions.token(position)) for position in positions
        ]
        total = canvas.memory.setdefault("masks", len(canvas.masks))
        if self.ascending:
            progress = ((2 << canvas.step) - 1) / (1 << num_steps(total))
        else:
            done = np.count_nonzero(canvas.committed >= 0)
            progress = done / max(1, total - 1)
        ranks[ends] *= self.least + (1 - self.least) * min(1.0, progress)
        return ranks


@register(
    Card(
        "eoser-ass",
        "diffusion",
        paper="Taming Masked Diffusion Language Models (arXiv:2509.23924)",
        exactness="lossy",
        summary="1, 2, 4, 8 ... tokens a pass on the whole canvas, ends of text held back first.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "progress of the uniform schedule is the share of masks filled",
            "the paper's reinforcement learning is not here",
        ),
    )
)
def eoser_ass(
    schedule: str = "ascending",
    least: float | None = None,
    blocks: int = 1,
    steps: int | None = None,
    mask: int | None = None,
) -> Denoiser:
    """`schedule` "ascending" doubles the tokens of each pass, "uniform" spreads them over `steps`.
    `least` is the first factor on the confidence of an end of text (0.01 ascending, 0.4 uniform).
    `blocks` peels powers of two off the end of the canvas into blocks of their own."""
    if schedule == "ascending":
        if steps is not None:
            raise InvalidRequestError("steps belongs to schedule=uniform")
        rejected = RejectedEnds(0.01 if least is None else least, ascending=True)
        return Denoiser(PeeledPowers(blocks), rejected, Ascending(), mask=mask)
    if schedule != "uniform":
        raise InvalidRequestError(f"schedule is ascending or uniform; {schedule!r} is neither")
    if blocks != 1:
        raise InvalidRequestError("blocks belongs to schedule=ascending")
    rejected = RejectedEnds(0.4 if least is None else least, ascending=False)
    return Denoiser(WholeCanvas(), rejected, TopKUnmasking(steps), mask=mask)
