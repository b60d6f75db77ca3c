"""The recurrent sublayer of xLSTM (Beck et al., arXiv:2405.04517; arXiv:2503.13427): a matrix of
memory per head, with an exponential input gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.interface import Backend, Recurrence, Weight, WkvWeights
from anydecode.models.linear import Linear


@dataclass(eq=False)
class Mlstm:
    """output(sigmoid(gate(x)) * norm(recurrence)), see `Recurrence`, "mlstm".

    Attributes:
        values: `[num_heads * head_dim, hidden_size]`, as is `gate`.
        keys: `[num_heads * state_size, hidden_size]`, as is `queries`.
        queries: Of the queries.
        gate: Of the output.
        input_gate: `[num_heads, hidden_size]`, as is `forget_gate`.
        forget_gate: Of what is kept.
        output: `[hidden_size, num_heads * head_dim]`.
        norm: Of each head, float32 `[num_heads * head_dim]`.
        norm_eps: Of that norm.
        gate_cap: What the input and forget gates are limited to by the tangent function.
    """

    values: Linear
    keys: Linear
    queries: Linear
    gate: Linear
    input_gate: Linear
    forget_gate: Linear
    output: Linear
    norm: np.ndarray
    norm_eps: float
    gate_cap: float

    @property
    def linears(self) -> dict[str, Linear]:
        """The matrices by name."""
        return {x: y for x, y in vars(self).items() if isinstance(y, Linear)}

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix of the sublayer."""
        return [weight for linear in self.linears.values() for weight in linear.matrices]

    def apply(self, backend: Backend, x: Any, layer: int, shape: Recurrence) -> Any:
        """The output of the sublayer of `layer` for its normed inputs."""
        inputs = self.values.apply(backend, x)
        for linear in (self.keys, self.queries):
            inputs = backend.join(inputs, linear.apply(backend, x))
        gates = tuple(
            backend.softcap(linear.apply(backend, x), self.gate_cap)
            for linear in (self.input_gate, self.forget_gate)
        )
        y = backend.recurrence(inputs, gates, layer, shape, WkvWeights())
        y = backend.layer_norm(y, self.norm, None, self.norm_eps, shape.num_heads)
        y = backend.gated(self.gate.apply(backend, x), y, "sigmoid")
        return self.output.apply(backend, y)
