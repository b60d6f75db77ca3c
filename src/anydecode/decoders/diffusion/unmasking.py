"""Unmask policies: which masks of the block a denoising step unmasks."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import best_first
from anydecode.errors import InvalidRequestError


class UnmaskPolicy(ABC):
    """Chooses among the masks of the block. Its state, if any, is in `canvas.policy_state`."""

    @abstractmethod
    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        """Choose the masks to unmask.

        Args:
            canvas: The canvas.
            predictions: The predictions of this step.
            positions: The masks of the block, ascending; at least one.
            ranks: The rank of each of them; larger is better.

        Returns:
            Boolean `[len(positions)]`. If none is chosen, the denoiser unmasks the best-ranked one.
        """

    def on_block_opened(self, canvas: Canvas) -> None:  # noqa: B027  most policies keep nothing per block
        """Called when a block has been opened, before `select`."""


def check_steps(steps: int | None) -> None:
    """Check a number of steps per block; None: the default.

    Raises:
        InvalidRequestError: It is below 1.
    """
    if steps is not None and steps < 1:
        raise InvalidRequestError(f"a block needs at least one step, not {steps}")


class TopKUnmasking(UnmaskPolicy):
    """Unmasks the best-ranked `masks of the block / steps` in each step (LLaDA).

    If this does not divide evenly, the first steps unmask one more.

    Args:
        steps: Denoising steps per block (default: one per mask).
    """

    def __init__(self, steps: int | None = None) -> None:
        check_steps(steps)
        self.steps = steps

    def quota(self, canvas: Canvas) -> int:
        """How many masks this step unmasks."""
        steps = min(self.steps or canvas.block_masks, canvas.block_masks)
        base, remainder = divmod(canvas.block_masks, steps)
        return base + (canvas.block_step < remainder)

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        return top_k(ranks, self.quota(canvas))


class TimeGrid(UnmaskPolicy):
    """Unmasks a share 1 - s/t of the remaining masks per step, where a step goes from time t to s
    (Dream).

    The times run from 1 down to `min_time` in equal steps. The last step unmasks all that remain.

    Args:
        steps: The number of steps. None: one mask per step, which is what the grid gives with as
            many steps as masks; it also holds if masks are added meanwhile.
        min_time: The last time of the grid.
    """

    def __init__(self, steps: int | None = None, min_time: float = 1e-3) -> None:
        if steps is not None and steps < 1:
            raise InvalidRequestError(f"a canvas needs at least one step, not {steps}")
        self.steps = steps
        self.min_time = min_time

    def times(self, step: int, steps: int) -> tuple[float, float]:
        """The times before and after a step."""
        t, s = (1 - i * (1 - self.min_time) / steps for i in (step, step + 1))
        return t, s

    def quota(self, canvas: Canvas, masks: int) -> int:
        """How many of the `masks` remaining masks this step unmasks."""
        if self.steps is None:
            return 1
        if canvas.block_step >= self.steps - 1:
            return masks
        t, s = self.times(canvas.block_step, self.steps)
        return max(1, int(masks * (1 - s / t)))

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        return top_k(ranks, self.quota(canvas, len(positions)))


class ThresholdUnmasking(UnmaskPolicy):
    """Unmasks every mask with a rank of at least `threshold` (Fast-dLLM).

    Args:
        threshold: The smallest rank. If no mask reaches it, the best-ranked one is unmasked.
        max_masks: The largest number of masks per step (default: no limit).
    """

    def __init__(self, threshold: float, max_masks: int | None = None) -> None:
        self.threshold = threshold
        self.max_masks = max_masks

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        chosen = ranks >= self.threshold
        if self.max_masks is not None and np.count_nonzero(chosen) > self.max_masks:
            chosen = top_k(ranks, self.max_masks)
        return chosen


class ThresholdOrSchedule(UnmaskPolicy):
    """Unmasks every mask with a rank above `threshold`, if those are at least as many as the
    schedule unmasks; else follows the schedule (SDAR's dynamic rule)."""

    def __init__(self, threshold: float, schedule: TopKUnmasking) -> None:
        self.threshold = threshold
        self.schedule = schedule

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        confident: np.ndarray = ranks > self.threshold
        count = self.schedule.quota(canvas)
        return confident if np.count_nonzero(confident) >= count else top_k(ranks, count)


class FactorUnmasking(UnmaskPolicy):
    """Unmasks the n best-ranked masks, for the largest n with (n + 1) (1 - c_n) < `factor`, where
    c_n is the rank of the n-th (Fast-dLLM)."""

    def __init__(self, factor: float = 1.0) -> None:
        if factor <= 0:
            raise InvalidRequestError(f"factor must be above 0, not {factor}")
        self.factor = factor

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        order = best_first(ranks)
        counts = np.arange(1, len(ranks) + 1)
        fits = np.flatnonzero((counts + 1) * (1 - ranks[order]) < self.factor)
        return top_k(ranks, int(fits[-1]) + 1 if len(fits) else 1)


def top_k(ranks: np.ndarray, count: int) -> np.ndarray:
    """Which of `ranks` are the `count` largest, boolean; of equal ranks the leftmost are taken."""
    chosen = np.zeros(len(ranks), bool)
    chosen[best_first(ranks)[:count]] = True
    return chosen
