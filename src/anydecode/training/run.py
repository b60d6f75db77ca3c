"""What training runs share: steps until a budget is spent, a history, and saved states."""

from __future__ import annotations

import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from anydecode.errors import InvalidRequestError

Result = TypeVar("Result")


class Budget(Protocol):
    """How long a run trains: `minutes` or `steps`; its state is saved every `save_seconds`."""

    @property
    def minutes(self) -> float | None: ...

    @property
    def steps(self) -> int | None: ...

    @property
    def save_seconds(self) -> float: ...


def check_budget(budget: Budget) -> None:
    """Raise `InvalidRequestError` unless one of `minutes` and `steps` is given."""
    if (budget.minutes is None) == (budget.steps is None):
        raise InvalidRequestError("training takes either minutes or steps")


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Ctrl-C within the block takes effect at its end: an interrupted step of an optimiser would
    have updated a part of the weights."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is None or threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it is interrupted
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if received:
            signal.raise_signal(signal.SIGINT)


class TrainingRun(ABC, Generic[Result]):
    """A training run in a folder, from which it can be resumed. A step returns a `Result`.

    Attributes:
        folder: The run's folder.
        step: Number of steps that were taken.
        seconds: Time that they took, without the saving.
        history: One entry for each `_record`, with the step and the seconds.
    """

    def __init__(self, folder: Path, budget: Budget) -> None:
        self.folder, self._budget = folder, budget
        self.step, self.seconds = 0, 0.0
        self.history: list[dict[str, Any]] = []

    @property
    def progress(self) -> float:
        """The fraction of the budget that is spent."""
        if self._budget.minutes is not None:
            return min(1.0, self.seconds / (60 * self._budget.minutes))
        return min(1.0, self.step / (self._budget.steps or 1))

    @abstractmethod
    def save(self) -> None:
        """Write the state, the log and the results."""

    @abstractmethod
    def _update(self) -> Result:
        """Take a step."""

    def _updates(self) -> Iterator[Result]:
        """Take steps until the budget is spent, yield the result of each, and save regularly.
        Ctrl-C takes effect between steps."""
        last, saved = time.monotonic(), self.seconds
        while self.progress < 1.0:
            with delayed_interrupt():
                result = self._update()
            now = time.monotonic()
            self.seconds, last = self.seconds + now - last, now
            yield result
            if self.seconds - saved > self._budget.save_seconds:
                self.save()
                last, saved = time.monotonic(), self.seconds

    def _record(self, **values: Any) -> None:
        self.history.append({"step": self.step, "seconds": round(self.seconds, 1), **values})


class LossRun(TrainingRun[float]):
    """A training run whose steps return their loss, and whose `save` also evaluates."""

    def train(self, report: Callable[[float, float], None] = lambda *_: None) -> None:
        """Train until the budget is spent; calls `report(fraction of the budget, loss)` after every
        step. Ctrl-C saves too."""
        if not self.step:
            self.save()
        losses: list[float] = []
        try:
            for loss in self._updates():
                losses = [*losses[-9:], loss]
                if self.step % 10 == 0:
                    self._record(loss=sum(losses) / len(losses))
                report(self.progress, loss)
        finally:
            self.save()

    def _descend(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Iterable[torch.Tensor],
        rate: float,
        floor: float = 0.0,
    ) -> None:
        """Take the step of `optimizer`: gradients of norm 1 at most, and a rate that rises for 20
        steps and falls to `floor` times the peak `rate` as half a cosine."""
        nn.utils.clip_grad_norm_(weights, 1.0)
        warmup = min(1.0, (self.step + 1) / 20)
        schedule = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * self.progress))
        for group in optimizer.param_groups:
            group["lr"] = rate * warmup * schedule
        optimizer.step()
        self.step += 1
