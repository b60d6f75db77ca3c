"""What the engine knows of a model: a spec, a cache of its own shape, and passes over rows."""

from __future__ import annotations

from typing import Protocol

import torch

from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.models.spec import ModelSpec


class Model(Protocol):
    """Scores rows; knows nothing of requests."""

    spec: ModelSpec
    name: str

    def new_cache(self, num_slots: int) -> KeyValues:
        """Empty keys and values for `num_slots` positions."""
        ...

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """One pass. Rows may run different layer ranges (`rows.start`, `rows.stop`)."""
        ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[n, vocab_size]` of states `[n, hidden_size]`, final norm included."""
        ...
