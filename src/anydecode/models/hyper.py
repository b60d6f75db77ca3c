"""Manifold-constrained hyper-connections (mHC, Xie et al., 2026), as in DeepSeek-V4.

The hidden states of a row are several vectors of `hidden_size` numbers, side by side, the streams.
A sublayer reads a sum of the streams, its output is added to each of them, and they are mixed, with
factors that depend on the row.
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


@dataclass(eq=False)
class HyperWeights:
    """The product of normed streams that gives a row's factors, see `Backend.hyper_factors`: a
    matrix `[HyperSpec.num_factors, streams * hidden_size]` with a bias; after the last layer one
    with `streams` rows."""

    projection: Linear

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        return self.projection.matrices

    def factors(self, backend: Backend, streams: Any, spec: ModelSpec) -> Any:
        """The factors of each row."""
        assert spec.hyper is not None, "checked by `_check_hyper`"
        y = self._products(backend, streams, spec)
        return backend.hyper_factors(y, spec.num_streams, spec.hyper.iterations, spec.hyper.eps)

    def _products(self, backend: Backend, streams: Any, spec: ModelSpec) -> Any:
        return self.projection.apply(backend, backend.rms_norm(streams, None, spec.norm_eps))

    def _connect_unmixed(
        self,
        backend: Backend,
        streams: Any,
        spec: ModelSpec,
        sublayer: Callable[[Any], Any],
        magnitude: float,
    ) -> Any:
        """The same without a mix of streams; the factors of outputs are `magnitude` times a sigmoid
        plus the epsilon."""
        count, products = spec.num_streams, self._products(backend, streams, spec)
        assert spec.hyper is not None, "checked by `_check_hyper`"
        eps = spec.hyper.eps
        first, second = (
            backend.hyper_factors(backend.columns(products, start, count), count, 1, own)
            for start, own in ((0, eps), (count, eps / magnitude))
        )
        y = sublayer(backend.collapse(streams, first, count))
        second = backend.scale(second, magnitude)
        return backend.add(streams, backend.spread(y, second, count))

    def connect(
        self, backend: Backend, streams: Any, spec: ModelSpec, sublayer: Callable[[Any], Any]
    ) -> Any:
        """The streams after a sublayer."""
        assert spec.hyper is not None, "checked by `_check_hyper`"
        if spec.hyper.magnitude is not None:
            return self._connect_unmixed(backend, streams, spec, sublayer, spec.hyper.magnitude)
        count, factors = spec.num_streams, self.factors(backend, streams, spec)
        first, second, others = (
            backend.columns(factors, start, size)
            for start, size in ((0, count), (count, count), (2 * count, count * count))
        )
        y = sublayer(backend.collapse(streams, first, count))
        mixed = backend.mix(streams, others, count)
        return backend.add(mixed, backend.spread(y, second, count))

    def merge(self, backend: Backend, streams: Any, spec: ModelSpec) -> Any:
        """The sum of the streams after the last layer, `[rows, hidden_size]`."""
        factors = self.factors(backend, streams, spec)
        return backend.collapse(streams, factors, spec.num_streams)

    def merge_rows(
        self, streams: np.ndarray, spec: ModelSpec, product: Callable[..., np.ndarray] | None
    ) -> np.ndarray:
        """The same outside a pass, float32 `[rows, hidden_size]`.

        Args:
            streams: float32 `[rows, streams * hidden_size]`.
            spec: The model's architecture.
            product: Multiplies rows by a weight and adds a bias; by default with numpy.
        """
        assert spec.hyper is not None, "checked by `_check_hyper`"
        rows = RowArithmetic()
        product = product or rows.linear
        normed = rows.rms_norm(streams, None, spec.norm_eps)
        products = product(normed, self.projection.weight, self.projection.bias)
        factors = 1 / (1 + np.exp(-products)) + np.float32(spec.hyper.eps)
        parts = streams.reshape(len(streams), spec.num_streams, -1)
        total: np.ndarray = (factors[:, :, None] * parts).sum(1)
        return total
