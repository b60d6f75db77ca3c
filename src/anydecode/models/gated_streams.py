"""Streams of hidden states that sublayers read through a gate of each number (Qwen3.8).

The hidden states of a row are `num_streams` vectors of `hidden_size` numbers, side by side. A
sublayer reads the mean of the normed streams, times gates that a product of two matrices gives. Its
output is added to each stream, with a factor that depends on the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.arithmetic import RowArithmetic
from anydecode.kernels.interface import Backend, Weight
from anydecode.models.linear import Linear
from anydecode.models.spec import ModelSpec
from anydecode.models.streams import mean_of_streams


@dataclass(eq=False)
class StreamGates:
    """The gates before a sublayer.

    Attributes:
        norm: Of the streams, float32 `[streams * hidden_size]`.
        down: `[rank, streams * hidden_size]`.
        up: `[streams * hidden_size, rank]`.
        factors: `[streams, streams * hidden_size]`; None after the last layer.
    """

    norm: np.ndarray
    down: Linear
    up: Linear
    factors: Linear | None = None

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        parts = (self.down, self.up, self.factors)
        return [weight for part in parts if part is not None for weight in part.matrices]

    def read(self, backend: Backend, streams: Any, spec: ModelSpec) -> tuple[Any, Any]:
        """The input of the sublayer `[rows, hidden_size]`, and the factors of its output `[rows,
        streams]`; None after the last layer."""
        normed = backend.rms_norm(streams, self.norm, spec.norm_eps, spec.num_streams)
        inner = backend.activate(self.down.apply(backend, normed), "silu")
        gated = backend.gated(self.up.apply(backend, inner), normed, "sigmoid")
        factors = None
        if self.factors is not None:
            share = backend.activate(self.factors.apply(backend, normed), "sigmoid")
            factors = backend.scale(share, 2.0)
        return mean_of_streams(backend, gated, spec), factors

    def read_rows(
        self, streams: np.ndarray, spec: ModelSpec, product: Callable[..., np.ndarray] | None
    ) -> np.ndarray:
        """The input of what reads the last streams, float32 `[rows, hidden_size]`, outside a pass.

        Args:
            streams: float32 `[rows, streams * hidden_size]`.
            spec: The model's architecture.
            product: Multiplies rows by a weight; by default with numpy.
        """
        rows = RowArithmetic()
        product = product or rows.linear
        normed = rows.rms_norm(streams, self.norm, spec.norm_eps, spec.num_streams)
        inner = product(normed, self.down.weight) * np.float32(self.down.scale)
        inner = inner / (1 + np.exp(-inner))
        gated = normed / (1 + np.exp(-product(inner, self.up.weight)))
        mean: np.ndarray = gated.reshape(len(streams), spec.num_streams, -1).mean(1)
        return mean
