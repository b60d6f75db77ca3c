"""Embeddings of tokens in every layer (Gemma 3n, Gemma 4, EmbeddingGemma 2).

Each token has an embedding of `per_layer_size` numbers for every layer. A projection of its usual
embedding is added, or is all that there is (EmbeddingGemma 2). A layer multiplies them with a
projection of its hidden states, and adds a projection of that product. They depend on the token
alone, so passes start at layer 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.interface import Activation, Backend, Weight
from anydecode.models.linear import Linear
from anydecode.models.spec import ModelSpec


def late_start_error(name: str) -> UnsupportedCombinationError:
    """The error for rows that start at a later layer of the model `name`."""
    return UnsupportedCombinationError(
        f"{name} has embeddings of tokens in every layer, a memory, several streams of hidden"
        " states, or layers that attend to the positions that an earlier one has selected; its"
        " passes start at layer 0, so methods that exit early and complete the layers later do not"
        " work with it"
    )


@dataclass(eq=False)
class PerLayerEmbeddings:
    """The embeddings of all layers, side by side.

    Attributes:
        table: `[tokens, layers * size]`; tokens after its end have those of token 0. None: there is
            the projection alone.
        projection: `[layers * size, hidden_size]`.
        norm: Of each layer's part of the projection, float32 `[size]`.
    """

    table: Weight | None
    projection: Linear
    norm: np.ndarray

    def inputs(self, backend: Backend, embedding: Weight, spec: ModelSpec) -> Any:
        """The embeddings of each row's token for all layers, `[rows, layers * size]`."""
        x = backend.token_rows(embedding, spec.embedding_scale, has_inputs=True)
        y = self.projection.apply(backend, x)
        y = backend.rms_norm(y, self.norm, spec.norm_eps, spec.num_layers)
        if self.table is None:
            return y
        y = backend.add(y, backend.token_rows(self.table, spec.per_layer_scale))
        return backend.scale(y, 2**-0.5)


@dataclass(eq=False)
class PerLayerBlock:
    """The matrices of one layer: `gate` `[size, hidden_size]`, `projection` `[hidden_size, size]`,
    and the norm of the result, float32 `[hidden_size]`."""

    gate: Linear
    projection: Linear
    norm: np.ndarray

    def apply(
        self, backend: Backend, x: Any, inputs: Any, activation: Activation, eps: float
    ) -> Any:
        """norm(projection(activation(gate(x)) * inputs))"""
        y = backend.gated(self.gate.apply(backend, x), inputs, activation)
        return backend.rms_norm(self.projection.apply(backend, y), self.norm, eps)
