"""Gated memory units (Ren et al., "Decoder-Hybrid-Decoder Architecture for Efficient Reasoning with
Long Generation", arXiv:2507.06607)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anydecode.kernels.interface import Backend
from anydecode.models.linear import Linear


@dataclass(eq=False)
class MemoryUnit:
    """output(silu(gate(x)) * memory): a sublayer that reads the memory of its own position, the
    output of an earlier layer's recurrence, and stores nothing.

    `gate` is `[memory_size, hidden_size]`, `output` `[hidden_size, memory_size]`.
    """

    gate: Linear
    output: Linear

    def apply(self, backend: Backend, x: Any, memory: Any) -> Any:
        """The output for the normed inputs x."""
        gated = backend.gated(self.gate.apply(backend, x), memory, "silu")
        return self.output.apply(backend, gated)
