"""Embeddings of n-grams (Qwen3.8): a layer that adds what the last tokens give to each stream.

Rows of a table, chosen by hashes of the last tokens, give a value, and a key for each stream. The
normed stream and its key give the value's gate. The gated value is added, and a convolution of its
norm over positions some apart, whose weights between these positions are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.interface import (
    Backend,
    NgramHash,
    Recurrence,
    RecurrenceWeights,
    Weight,
)
from anydecode.models.linear import Linear
from anydecode.models.spec import ModelSpec


@dataclass(eq=False)
class NgramWeights:
    """The weights of such a layer. Norms are float32 `[streams * hidden_size]`.

    Attributes:
        table: `[rows, size]`.
        hashes: Which rows of it stand for a token; all heads of a token give `width` numbers.
        key: `[streams * hidden_size, width]`.
        value: `[hidden_size, width]`.
        key_norm: Of keys.
        query_norm: Of streams.
        conv_norm: Of gated values.
        ones: `[1, hidden_size]`, whose product with numbers is their sum, times a factor.
        vectors: The convolution; it has a channel more, for tokens, whose weights are zero.
    """

    table: Weight
    hashes: NgramHash
    key: Linear
    value: Linear
    key_norm: np.ndarray
    query_norm: np.ndarray
    conv_norm: np.ndarray
    ones: Weight
    vectors: RecurrenceWeights

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix of a product."""
        return [*self.key.matrices, *self.value.matrices, self.ones]

    def apply(
        self, backend: Backend, streams: Any, layer: int, shape: Recurrence, spec: ModelSpec
    ) -> Any:
        """The streams after the layer."""
        count, eps, width = spec.num_streams, spec.norm_eps, spec.num_streams * spec.hidden_size
        x = backend.ngram_rows(self.table, layer, shape, width, self.hashes)
        keys = backend.rms_norm(self.key.apply(backend, x), self.key_norm, eps, count)
        queries = backend.rms_norm(streams, self.query_norm, eps, count)
        products = backend.gated(keys, queries, "identity")
        scores = backend.grouped_linear(products, [self.ones] * count)
        gates = backend.activate(backend.activate(scores, "signed_root"), "sigmoid")
        values = backend.spread(self.value.apply(backend, x), gates, count)
        normed = backend.rms_norm(values, self.conv_norm, eps, count)
        mixed = backend.convolution(normed, layer, shape, self.vectors)
        values = backend.add(values, backend.columns(mixed, 0, width))
        return backend.add(streams, values)
