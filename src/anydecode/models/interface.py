"""The interface between the engine and a model: a spec, a key-value cache and forward passes."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.models.spec import ModelSpec


class Model(Protocol):
    """Computes logits and hidden states of rows. Requests and sequences are unknown to it."""

    spec: ModelSpec
    name: str

    def new_cache(self, num_slots: int) -> KeyValues:
        """Empty keys and values for `num_slots` positions."""
        ...

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        """One forward pass. Rows may run different layer ranges (`rows.start`, `rows.stop`)."""
        ...

    def head(self, hidden: np.ndarray) -> np.ndarray:
        """Logits float32 `[n, vocab_size]` of hidden states `[n, hidden_size]`, final norm
        included."""
        ...
