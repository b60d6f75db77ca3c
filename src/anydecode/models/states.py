"""The inputs of a drafter that reads a state beside each token (EAGLE: Li et al., arXiv:2401.15077
and arXiv:2503.01840) or attends to a context of states (DFlash: arXiv:2602.06036).

With EAGLE the state of a row is that of its target at the position before, or the drafter's own
where the target has not computed one yet. Hidden states start as these states; the first layer
reads the tokens' embeddings beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode.kernels.arithmetic import RowArithmetic
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Backend, Weight
from anydecode.models.linear import Linear
from anydecode.models.spec import ModelSpec

#: x @ weight.T + bias, of float32 `[rows, in_features]`.
Product = Callable[[np.ndarray, Weight, "np.ndarray | None"], np.ndarray]


@dataclass(eq=False)
class StateWeights:
    """The weights that read states; see `StateSpec`. Norms are float32.

    Attributes:
        projection: `[hidden_size, 2 * hidden_size]`, of an embedding and a state side by side.
        embedding_norm: `[hidden_size]`.
        state_norm: `[hidden_size]`, or of all streams; of a context, after the projection.
        target: `[hidden_size, taps * target_size]`, of the target's states side by side.
        target_norms: One `[target_size]` per tap, or one of all of them side by side.
        cells: In place of the projection: LSTM cells, one after the other, that start from zero in
            every row. Matrices of the input gate, the candidate and the output gate `[3 *
            hidden_size, in_features]`; the first reads an embedding and a state side by side.
        mask: `[mask tokens, taps * target_size]`, in place of the target's states of mask tokens;
            one row if it is the same for all.
    """

    projection: Linear | None = None
    embedding_norm: np.ndarray | None = None
    state_norm: np.ndarray | None = None
    target: Linear | None = None
    target_norms: list[np.ndarray] = field(default_factory=list)
    cells: list[Linear] = field(default_factory=list)
    mask: np.ndarray | None = None
    _target_matrix: np.ndarray | None = field(default=None, init=False, repr=False)

    def inputs(self, backend: Backend, x: Any, embedding: Weight, spec: ModelSpec) -> Any:
        """The inputs of the first layer: what its sublayers' outputs are added to."""
        states = spec.states
        assert states is not None
        if self.projection is not None and spec.num_streams > 1:
            return self._project_streams(backend, x, embedding, spec, self.projection)
        if self.projection is not None:
            return self.projection.apply(backend, self._pair(backend, x, embedding, spec))
        if self.cells:
            return self._run_cells(
                backend, self._pair(backend, x, embedding, spec), spec.hidden_size
            )
        if states.has_normed_residual:
            return backend.rms_norm(x, self.state_norm, spec.norm_eps)
        return x

    def _project_streams(
        self, backend: Backend, x: Any, embedding: Weight, spec: ModelSpec, projection: Linear
    ) -> Any:
        """The product of the embedding beside each stream of the state."""
        size, found = spec.hidden_size, None
        both = self._pair(backend, x, embedding, spec)
        tokens = backend.columns(both, 0, size)
        for stream in range(1, spec.num_streams + 1):
            pair = backend.join(tokens, backend.columns(both, stream * size, size))
            y = projection.apply(backend, pair)
            found = y if found is None else backend.join(found, y)
        return found

    def _run_cells(self, backend: Backend, x: Any, size: int) -> Any:
        """sigmoid(output) * tanh(sigmoid(input) * tanh(candidate)), cell after cell."""
        for cell in self.cells:
            gates = cell.apply(backend, x)
            entry, candidate, exit = (
                backend.columns(gates, part * size, size) for part in range(3)
            )
            memory = backend.gated(entry, backend.softcap(candidate, 1.0), "sigmoid")
            x = backend.gated(exit, backend.softcap(memory, 1.0), "sigmoid")
        return x

    def attention_inputs(self, backend: Backend, x: Any, embedding: Weight, spec: ModelSpec) -> Any:
        """The inputs of the first layer's attention where there is no `projection`, from the result
        of `inputs`."""
        assert spec.states is not None
        is_normed = spec.states.has_normed_residual
        return self._pair(backend, x, embedding, spec, has_normed_state=is_normed)

    def _pair(
        self,
        backend: Backend,
        x: Any,
        embedding: Weight,
        spec: ModelSpec,
        has_normed_state: bool = False,
    ) -> Any:
        tokens = backend.token_rows(embedding, spec.embedding_scale)
        if self.embedding_norm is not None:
            tokens = backend.rms_norm(tokens, self.embedding_norm, spec.norm_eps)
        if self.state_norm is not None and not has_normed_state:
            assert spec.states is not None
            groups = spec.num_streams if spec.states.norms_streams else 1
            x = backend.rms_norm(x, self.state_norm, spec.norm_eps, groups)
        return backend.join(tokens, x)

    def project(
        self, taps: list[np.ndarray], spec: ModelSpec, product: Product | None = None
    ) -> np.ndarray:
        """What the drafter reads of positions of the target.

        Args:
            taps: The target's states, float32 `[rows, target_size]` each, in the order of
                `StateSpec.taps`.
            spec: The drafter's architecture.
            product: Multiplies rows by a weight and adds a bias; by default with numpy.

        Returns:
            float32 `[rows, hidden_size]`.
        """
        rows = RowArithmetic()
        if len(self.target_norms) == len(taps):
            taps = [
                rows.rms_norm(tap, norm, spec.norm_eps)
                for tap, norm in zip(taps, self.target_norms, strict=True)
            ]
        states = np.concatenate(taps, -1)
        if len(self.target_norms) == 1 < len(taps):
            states = rows.rms_norm(states, self.target_norms[0], spec.norm_eps)
        if self.target is not None and product is not None:
            states = product(states, self.target.weight, self.target.bias)
        elif self.target is not None:
            states = self._product(states, self.target)
        if spec.starts_from_states:
            return states
        return rows.rms_norm(states, self.state_norm, spec.norm_eps)

    def projected(self, backend: Backend, x: Any, spec: ModelSpec) -> Any:
        """`project` as operations of a backend. x has the taps side by side."""
        if self.target_norms:
            norms = np.concatenate(self.target_norms)
            x = backend.rms_norm(x, norms, spec.norm_eps, len(self.target_norms))
        if self.target is not None:
            x = self.target.apply(backend, x)
        if spec.starts_from_states:
            return x
        return backend.rms_norm(x, self.state_norm, spec.norm_eps)

    def _product(self, states: np.ndarray, target: Linear) -> np.ndarray:
        if self._target_matrix is None:  # no kernel reads it, so that it is not packed
            self._target_matrix = dequantize(target.weight).T.copy()
            target.weight.free()
        states = states @ self._target_matrix
        return states if target.bias is None else states + target.bias

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix that a kernel reads."""
        linears = [*self.cells] if self.projection is None else [self.projection]
        return [linear.weight for linear in linears]
