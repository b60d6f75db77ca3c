"""Drafters with one head per drafted token (Medusa, Hydra, Clover).

The state of a row ends with its step: the number of tokens that were drafted before it on its path.
The row runs through the layers and the head of that step. So decoders see a drafter that reads
states like any other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.host import to_host
from anydecode.kernels.interface import Backend, KeyValues, Output, OutputSpec, Rows, Weight
from anydecode.models.network import Network
from anydecode.models.transformer import Executor, Transformer, run_parts


@dataclass(eq=False)
class StepNetwork(Network, ABC):
    """A network of which each step has layers and a head of its own.

    Hidden states have `width` numbers: the state of a row without its step. The head reads the
    output of the last layer; most kinds have one.
    """

    def __post_init__(self) -> None:
        """Raise CheckpointError if the weights do not match the spec."""
        if self.weights.embedding not in self.packed:
            raise CheckpointError("a drafter with one head per token uses its target's embedding")
        states = self.spec.states
        if states is None or not states.num_heads:
            raise CheckpointError("the spec has no number of heads")

    @property
    def num_steps(self) -> int:
        """The number of heads."""
        assert self.spec.states is not None, "checked by `__post_init__`"
        return self.spec.states.num_heads

    @property
    def width(self) -> int:
        return self.spec.hidden_size - 1

    @property
    def shared_head(self) -> bool:
        """Whether all steps have the same head."""
        return False

    @abstractmethod
    def step_layer(self, backend: Backend, x: Any, step: int, index: int) -> Any:
        """The output of layer `index` of `step`."""

    @abstractmethod
    def step_head(self, backend: Backend, x: Any, step: int) -> Any:
        """The logits of `step`, from the output of its layer."""

    @abstractmethod
    def step_matrices(self) -> Iterator[Weight]:
        """Yield every matrix of a product."""

    def matrices(self) -> Iterator[Weight]:
        yield self.weights.embedding
        yield from self.step_matrices()

    def layer(self, backend: Backend, x: Any, index: int) -> Any:
        return self.step_layer(backend, x, 0, index)

    def head(self, backend: Backend, x: Any) -> Any:
        return self.step_head(backend, x, 0)

    def functions(
        self, step: int
    ) -> tuple[Callable[[Backend, Any, int], Any], Callable[[Backend, Any], Any]]:
        """`layer` and `head` of a step."""
        return (
            lambda backend, x, index: self.step_layer(backend, x, step, index),
            lambda backend, x: self.step_head(backend, x, step),
        )


class StepTransformer(Transformer):
    """A `StepNetwork` as a model. The rows of a pass run in one part per step; rows behind the last
    step have no candidates, so their logits are -inf. Arguments as for `Transformer`."""

    network: StepNetwork

    def __init__(
        self, network: StepNetwork, *, name: str, executor: Callable[[Network], Executor]
    ) -> None:
        super().__init__(network, name=name, executor=executor)
        assert network.spec.states is not None
        self._reads_tokens = network.spec.states.reads_tokens
        self._functions = [network.functions(step) for step in range(network.num_steps)]
        for functions in self._functions:  # packs the weights of all steps
            self._regroup(*functions)
        self._regroup(None, None)

    def _regroup(self, layer: Any, head: Any) -> None:
        executor: Any = self.executor  # the Triton kernels, which cannot, refuse such drafters
        executor.regroup(layer, head)

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        self._check(rows, output_spec)
        inputs = to_host(rows.inputs)
        steps = inputs[:, -1].astype(np.int64)
        states = {depth: inputs[index] for depth, index in output_spec.hidden.items()}
        groups = np.where(steps < self.network.num_steps, steps, -1)
        if self.spec.layers[0].attention is None:  # nothing is stored, so only outputs count
            is_read = np.zeros(len(rows), bool)
            is_read[output_spec.logits] = True
            for index in output_spec.hidden.values():
                is_read[index] |= self._reads_tokens
            groups = np.where(is_read, groups, -1)
        logits = np.full((len(output_spec.logits), self.spec.num_logits), -np.inf, np.float32)
        if not self._reads_tokens:
            output_spec = OutputSpec(output_spec.logits, {})
        if self.network.shared_head:
            self._run_shared(rows, cache, groups, output_spec, logits)
            return Output(logits, states)
        hidden = {depth: state[:, :-1] for depth, state in states.items()}
        if not self._reads_tokens:
            hidden = {}
        run_parts(rows, groups, output_spec, self._runner(cache), Output(logits, hidden))
        return Output(logits, states)

    def _run_shared(
        self,
        rows: Rows,
        cache: KeyValues,
        groups: np.ndarray,
        output_spec: OutputSpec,
        logits: np.ndarray,
    ) -> None:
        """Run the layers of each step, then the head of all of them together."""
        has_head = groups[output_spec.logits] >= 0
        index = output_spec.logits[has_head]
        x = np.empty((len(index), self.network.width), np.float32)
        layers = OutputSpec(np.empty(0, np.int32), {1: index})
        none = np.empty((0, self.spec.num_logits), np.float32)
        run_parts(rows, groups, layers, self._runner(cache), Output(none, {1: x}))
        if len(index):
            logits[has_head] = to_host(self.executor.head(x))

    def _runner(self, cache: KeyValues) -> Callable[[int, Rows, OutputSpec], Output]:
        def run(step: int, part: Rows, part_spec: OutputSpec) -> Output:
            self._regroup(*self._functions[step])
            try:
                inputs = to_host(part.inputs)[:, :-1]
                return self.executor.run(replace(part, inputs=inputs), cache, part_spec)
            finally:
                self._regroup(None, None)

        return run

    def project_states(self, taps: list[np.ndarray]) -> np.ndarray:
        """The states of rows behind the target's positions: its own, zeros where the embeddings of
        drafted tokens follow, and step 0."""
        states = np.zeros((len(taps[0]), self.spec.hidden_size), np.float32)
        states[:, : taps[0].shape[1]] = taps[0]
        return states

    def own_states(self, hidden: np.ndarray) -> np.ndarray:
        """The states of the next step."""
        states = hidden.copy()
        states[:, -1] += 1
        return states
