"""Routers that are small networks and read the states of the routers of earlier layers (ZAYA1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.interface import Backend, Weight
from anydecode.models.linear import Linear


@dataclass(eq=False)
class RouterStates:
    """The state of a layer's router is down(x), plus `factors` times that of the layer before. The
    inputs of `Experts.router` are gelu(second(gelu(first(norm(state))))).

    Attributes:
        down: `[router's hidden size, hidden_size]`.
        norm: Float32 `[router's hidden size]`.
        first: `[router's hidden size, router's hidden size]`, as is `second`.
        second: See above.
        factors: Float32 `[router's hidden size]`; None in the first layer.
        eps: Of the norm.
    """

    down: Linear
    norm: np.ndarray
    first: Linear
    second: Linear
    eps: float
    factors: np.ndarray | None = None

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        linears = (self.down, self.first, self.second)
        return [weight for linear in linears for weight in linear.matrices]

    def state(self, backend: Backend, x: Any, before: Any) -> Any:
        """The state of the layer's router for the inputs x of its experts."""
        y = self.down.apply(backend, x)
        return y if self.factors is None else backend.add(y, backend.multiply(before, self.factors))

    def inputs(self, backend: Backend, state: Any) -> Any:
        """What the last matrix of the router reads."""
        y = backend.rms_norm(state, self.norm, self.eps)
        for linear in (self.first, self.second):
            y = backend.activate(linear.apply(backend, y), "gelu")
        return y
