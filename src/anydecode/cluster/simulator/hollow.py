"""A model that computes nothing, whose passes take the time that a table of costs says."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from anydecode.engine.model_runner import ModelRunner
from anydecode.engine.plan import Plan
from anydecode.kernels.interface import Attention, KeyValues, Output, OutputSpec, Rows
from anydecode.models.scripted import BYTE_VOCABULARY
from anydecode.models.spec import LayerSpec, ModelSpec
from anydecode.scoring.cost import CostTable, ThreadCosts

_HIDDEN_SIZE = 1


@dataclass
class HollowExecutor:
    """The threads of a hollow model."""

    threads: int
    threads_in_use: int


class HollowModel:
    """A `Model` with the layers and the costs of another one. All its logits are 0.

    Args:
        costs: The costs of passes, which schedules are told.
        num_layers: The number of layers.
        max_positions: The context length.
        threads: The number of threads. With two or more, two passes can run at the same time.
    """

    def __init__(
        self,
        costs: CostTable,
        num_layers: int = 1,
        max_positions: int = 1 << 20,
        threads: int = 1,
    ) -> None:
        self.spec = ModelSpec(
            architecture="hollow",
            vocab_size=BYTE_VOCABULARY,
            hidden_size=_HIDDEN_SIZE,
            max_positions=max_positions,
            norm_eps=1e-5,
            layers=(LayerSpec(Attention(1, 1, 1, 1.0), None),) * num_layers,
        )
        self.name = "hollow"
        self.cost_table = costs
        self.executor = HollowExecutor(threads, threads)

    def beside(self, team: int) -> HollowModel | None:
        """This model with a choice of threads of its own, whose passes run at the same time as
        those of another team; None with one thread."""
        if self.executor.threads == 1:
            return None
        other = copy(self)
        other.executor = copy(self.executor)
        return other

    def new_cache(self, num_slots: int) -> KeyValues:
        """A cache of one number per slot, which all layers share."""
        shared = np.zeros((num_slots, 1, 1), np.float16)
        layers = [shared] * self.spec.num_layers
        return KeyValues(layers, layers)

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """No pass: logits and hidden states are 0."""
        hidden = {
            layer: np.zeros((len(index), _HIDDEN_SIZE), np.float32)
            for layer, index in output_spec.hidden.items()
        }
        return Output(self.head(np.zeros((len(output_spec.logits), _HIDDEN_SIZE))), hidden)

    def head(self, hidden: np.ndarray) -> np.ndarray:
        """Logits float32 `[n, vocab_size]`, 0."""
        return np.zeros((len(hidden), self.spec.vocab_size), np.float32)


class PassSeconds(Protocol):
    """The duration of passes."""

    def __call__(self, plan: Plan, /) -> float:
        """The duration of a pass in seconds."""
        ...


class TableSeconds:
    """Durations by a table of costs. Rows that run some of the layers cost their share.

    Args:
        costs: The table.
        pass_seconds: What each pass takes in addition.
        answer_seconds: What each sequence of a pass takes in addition.
    """

    def __init__(
        self, costs: CostTable, pass_seconds: float = 0.0, answer_seconds: float = 0.0
    ) -> None:
        self._costs = costs
        self._pass_seconds, self._answer_seconds = pass_seconds, answer_seconds

    def __call__(self, plan: Plan) -> float:
        """The duration of a pass in seconds."""
        rows = plan.rows
        depth = max(1, int(rows.stop.max()))
        num_rows = max(1, round(float((rows.stop - rows.start).sum()) / depth))
        besides = self._pass_seconds + self._answer_seconds * len(plan.scheduled)
        return besides + self._costs.seconds(num_rows, int(rows.prefix.mean()))


def seconds_after_pause(known: Mapping[float, float], pause: float) -> float:
    """What a pass takes in addition after so many seconds without one, between those of `known`."""
    if not known:
        return 0.0
    pauses = sorted(known)
    return float(np.interp(pause, pauses, [known[one] for one in pauses]))


class VirtualClock:
    """The clock of an engine in virtual time.

    Args:
        seconds: The duration of passes that run alone.
        thread_costs: The costs of passes by number of threads. A pass beside another one takes
            longer in the ratio of those of its threads and of all, and by their contention; None:
            equally long.
        pause_seconds: What a pass takes in addition, by the seconds without a pass before it; none:
            nothing.
        first_use_seconds: What it takes in addition for each position of the cache that it is the
            first to use.

    Attributes:
        pause: The time without a pass before those that begin.
        launched: The passes that have begun, with their durations in seconds; the caller empties
            the list.
    """

    def __init__(
        self,
        seconds: PassSeconds,
        thread_costs: ThreadCosts | None = None,
        pause_seconds: Mapping[float, float] | None = None,
        first_use_seconds: float = 0.0,
    ) -> None:
        self._seconds, self._thread_costs = seconds, thread_costs
        self._pause_seconds = pause_seconds or {}
        self._first_use_seconds = first_use_seconds
        self._is_used = np.zeros(0, bool)  # by slot
        self.pause = 0.0
        self.launched: list[tuple[Plan, float]] = []

    def seconds(self, runner: ModelRunner, plan: Plan) -> float:
        """The virtual duration of a pass."""
        seconds = self._seconds(plan) + seconds_after_pause(self._pause_seconds, self.pause)
        seconds += self._first_use_seconds * self._num_first_used(runner, plan)
        if self._thread_costs is not None and not plan.is_alone:
            executor: Any = runner.model.executor  # type: ignore[attr-defined]
            rows, context = len(plan.rows), int(plan.rows.prefix.mean())
            of_threads, of_all = (
                self._thread_costs.seconds(rows, context, threads)
                for threads in (executor.threads_in_use, executor.threads)
            )
            seconds *= of_threads / of_all * self._thread_costs.contention(rows, context)
        self.launched.append((plan, seconds))
        return seconds

    def _num_first_used(self, runner: ModelRunner, plan: Plan) -> int:
        """The number of slots that the pass writes and that none has written before."""
        if len(self._is_used) != runner.pool.num_slots:
            self._is_used = np.zeros(runner.pool.num_slots, bool)
        slots = plan.rows.slots
        first = slots[~self._is_used[slots]]
        self._is_used[first] = True
        return len(first)
