"""A model that computes nothing, whose passes take the time that a table of costs says."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from anydecode.engine.model_runner import ModelRunner
from anydecode.engine.plan import Plan
from anydecode.kernels.interface import Attention, KeyValues, Output, OutputSpec, Rows
from anydecode.models.scripted import BYTE_VOCABULARY
from anydecode.models.spec import LayerSpec, ModelSpec
from anydecode.scoring.cost import CostTable

_HIDDEN_SIZE = 1


class HollowModel:
    """A `Model` with the layers and the costs of another one. All its logits are 0.

    Args:
        costs: The costs of passes, which schedules are told.
        num_layers: The number of layers.
        max_positions: The context length.
    """

    def __init__(self, costs: CostTable, num_layers: int = 1, max_positions: int = 1 << 20) -> None:
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


class VirtualClock:
    """The clock of an engine in virtual time.

    Args:
        seconds: The duration of passes.

    Attributes:
        plan: The last pass.
        last: Its duration.
    """

    def __init__(self, seconds: PassSeconds) -> None:
        self._seconds = seconds
        self.plan: Plan | None = None
        self.last = 0.0

    def seconds(self, runner: ModelRunner, plan: Plan) -> float:
        """The virtual duration of a pass."""
        self.plan, self.last = plan, self._seconds(plan)
        return self.last
