"""Norms whose output has a gate (A.X K2, SK Telecom, 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anydecode.kernels.interface import Backend, Weight
from anydecode.models.linear import Linear


@dataclass(eq=False)
class NormGate:
    """The gate of a norm's output y: y * sigmoid(up(silu(down(y)))).

    Attributes:
        down: `[rank, hidden_size]`.
        up: `[hidden_size, rank]`.
    """

    down: Linear
    up: Linear

    @property
    def matrices(self) -> list[Weight]:
        return [*self.down.matrices, *self.up.matrices]

    def apply(self, backend: Backend, y: Any) -> Any:
        """The gated output of the norm."""
        inner = backend.activate(self.down.apply(backend, y), "silu")
        return backend.gated(self.up.apply(backend, inner), y, "sigmoid")
