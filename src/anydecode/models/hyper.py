"""Manifold-constrained hyper-connections (mHC, Xie et al., 2026), as in DeepSeek-V4.

The hidden states of a row are several vectors of `hidden_size` numbers, side by side, the streams.
A sublayer reads a sum of the streams, its output is added to each of them, and they are mixed, with
factors that depend on the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anydecode.kernels.interface import Backend, Weight
from anydecode.models.linear import Linear
from anydecode.models.spec import ModelSpec
from anydecode.models.streams import as_first_stream


@dataclass(eq=False)
class HyperWeights:
    """The product of normed streams that gives a row's factors, see `Backend.hyper_factors`: a
    matrix `[streams * (2 + streams), streams * hidden_size]` with a bias; after the last layer one
    with `streams` rows."""

    projection: Linear

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        return self.projection.matrices

    def factors(self, backend: Backend, streams: Any, spec: ModelSpec) -> Any:
        """The factors of each row."""
        assert spec.hyper is not None, "checked by `_check_hyper`"
        y = self.projection.apply(backend, backend.rms_norm(streams, None, spec.norm_eps))
        return backend.hyper_factors(y, spec.num_streams, spec.hyper.iterations, spec.hyper.eps)

    def connect(
        self, backend: Backend, streams: Any, spec: ModelSpec, sublayer: Callable[[Any], Any]
    ) -> Any:
        """The streams after a sublayer."""
        count, factors = spec.num_streams, self.factors(backend, streams, spec)
        first, second, others = (
            backend.columns(factors, start, size)
            for start, size in ((0, count), (count, count), (2 * count, count * count))
        )
        y = sublayer(backend.collapse(streams, first, count))
        mixed = backend.mix(streams, others, count)
        return backend.add(mixed, backend.spread(y, second, count))

    def merge(self, backend: Backend, streams: Any, spec: ModelSpec) -> Any:
        """The sum of the streams after the last layer in place of the first one; the others are
        zero."""
        factors = self.factors(backend, streams, spec)
        return as_first_stream(backend, backend.collapse(streams, factors, spec.num_streams), spec)


def mean_stream(backend: Backend, streams: Any, spec: ModelSpec) -> Any:
    """The mean of the streams in place of the first one; the others are zero (GLM-5.3)."""
    size = spec.hidden_size
    total = backend.columns(streams, 0, size)
    for index in range(1, spec.num_streams):
        total = backend.add(total, backend.columns(streams, index * size, size))
    return as_first_stream(backend, backend.scale(total, 1.0 / spec.num_streams), spec)


@dataclass(eq=False)
class HyperConnections:
    """The hyper-connections of a layer's two sublayers."""

    mixer: HyperWeights
    mlp: HyperWeights

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        return [*self.mixer.matrices, *self.mlp.matrices]
