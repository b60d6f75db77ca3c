"""Which masks a pass fills."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import best_first
from anydecode.errors import InvalidRequestError


class UnmaskPolicy(ABC):
    """Chooses among the masks of the block. What it must remember lives in `canvas.memory`."""

    @abstractmethod
    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        """Boolean `[len(positions)]`. `positions` are masks, ascending, and never none; `ranks`
        is what
        the ranking says of them. The denoiser adds the best one where none is chosen."""

    def opened(self, canvas: Canvas) -> None:  # noqa: B027  most policies keep nothing per block
        """A block has just been opened, before anything is selected in it."""


class TopKUnmasking(UnmaskPolicy):
    """The best `masks of the block / steps` of each pass; the remainder goes to the first passes
    (LLaDA). `steps` is per block; None: one token per pass."""

    def __init__(self, steps: int | None = None) -> None:
        if steps is not None and steps < 1:
            raise InvalidRequestError("a block needs at least one step")
        self.steps = steps

    def quota(self, canvas: Canvas) -> int:
        """How many positions this pass fills."""
        steps = min(self.steps or canvas.block_masks, canvas.block_masks)
        base, more = divmod(canvas.block_masks, steps)
        return base + (canvas.block_step < more)

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        return best(ranks, self.quota(canvas))


class TimeGrid(UnmaskPolicy):
    """A share 1 - s/t of the masks in each of `steps` passes over t from 1 down to `least`, all
    that is left in the last (Dream). `steps` None: one mask in each pass, which is what the grid
    gives with as many steps as masks, however many come while it runs."""

    def __init__(self, steps: int | None = None, least: float = 1e-3) -> None:
        if steps is not None and steps < 1:
            raise InvalidRequestError("a canvas needs at least one step")
        self.steps = steps
        self.least = least

    def times(self, step: int, steps: int) -> tuple[float, float]:
        """Where the grid stands before and after a pass."""
        t, s = (1 - at * (1 - self.least) / steps for at in (step, step + 1))
        return t, s

    def quota(self, canvas: Canvas, masks: int) -> int:
        """How many of the `masks` that are left this pass fills."""
        if self.steps is None:
            return 1
        if canvas.block_step >= self.steps - 1:
            return masks
        t, s = self.times(canvas.block_step, self.steps)
        return max(1, int(masks * (1 - s / t)))

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        return best(ranks, self.quota(canvas, len(positions)))


class ThresholdUnmasking(UnmaskPolicy):
    """Every mask ranked at least `least`, the best one anyhow (Fast-dLLM); `most` at a time."""

    def __init__(self, least: float, most: int | None = None) -> None:
        self.least = least
        self.most = most

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        chosen = ranks >= self.least
        if self.most is not None and np.count_nonzero(chosen) > self.most:
            chosen = best(ranks, self.most)
        return chosen


class ThresholdOrSchedule(UnmaskPolicy):
    """Every mask ranked above `least` if those are at least as many as the schedule's, else the
    schedule's (SDAR's dynamic rule)."""

    def __init__(self, least: float, schedule: TopKUnmasking) -> None:
        self.least = least
        self.schedule = schedule

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        sure: np.ndarray = ranks > self.least
        count = self.schedule.quota(canvas)
        return sure if np.count_nonzero(sure) >= count else best(ranks, count)


class FactorUnmasking(UnmaskPolicy):
    """The n best, for the largest n with (n + 1) (1 - c_n) < `factor` (Fast-dLLM)."""

    def __init__(self, factor: float = 1.0) -> None:
        if factor <= 0:
            raise InvalidRequestError("the factor must be above 0")
        self.factor = factor

    def select(
        self, canvas: Canvas, predictions: Predictions, positions: np.ndarray, ranks: np.ndarray
    ) -> np.ndarray:
        order = best_first(ranks)
        counts = np.arange(1, len(ranks) + 1)
        fits = np.flatnonzero((counts + 1) * (1 - ranks[order]) < self.factor)
        return best(ranks, int(fits[-1]) + 1 if len(fits) else 1)


def best(ranks: np.ndarray, count: int) -> np.ndarray:
    """Boolean: the `count` largest; among equals the leftmost."""
    chosen = np.zeros(len(ranks), bool)
    chosen[best_first(ranks)[:count]] = True
    return chosen
