"""Several streams of hidden states (AltUp, Baykal et al., NeurIPS 2023), as in Gemma 3n.

The hidden states of a row are `num_streams` vectors of `hidden_size` numbers, side by side. A layer
predicts all of them by a mix of all, computes one of them, the active one, and corrects the others
by the difference between its prediction and its result. The coefficients depend on the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from anydecode.kernels.interface import Backend, Weight
from anydecode.models.linear import Linear
from anydecode.models.per_layer import PerLayerBlock
from anydecode.models.spec import LayerSpec, ModelSpec


class HasMatrices(Protocol):
    """A part of a layer."""

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""


Part = TypeVar("Part", bound=HasMatrices)


@dataclass(eq=False)
class Sublayers(Generic[Part]):
    """The parts around the two sublayers of a layer."""

    mixer: Part
    mlp: Part

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        return [*self.mixer.matrices, *self.mlp.matrices]


@dataclass(eq=False)
class StreamProjections:
    """The matrices `[hidden_size, hidden_size]` of the streams but the first: `first` of
    embeddings, `last` of the states after the last layer, before they are averaged."""

    first: list[Linear]
    last: list[Linear]

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        return [linear.weight for linear in (*self.first, *self.last)]

    def expand(self, backend: Backend, x: Any) -> Any:
        """The streams of embeddings x `[rows, hidden_size]`: x, and its products, as large as x."""
        streams = x
        for linear in self.first:
            part = backend.match_magnitude(linear.apply(backend, x), x)
            streams = backend.join(streams, part)
        return streams

    def merge(self, backend: Backend, streams: Any, size: int) -> Any:
        """The mean of the first stream and of the products of the others, as large as the first,
        `[rows, size]`."""
        first = total = backend.columns(streams, 0, size)
        for index, linear in enumerate(self.last, 1):
            part = linear.apply(backend, backend.columns(streams, index * size, size))
            total = backend.add(total, backend.match_magnitude(part, first))
        return backend.scale(total, 1.0 / (len(self.last) + 1))


@dataclass(eq=False)
class StreamBlock:
    """The weights by which a layer predicts and corrects the streams, and of its low-rank residual
    (LAuReL, Menghani et al., arXiv:2411.07501). Norms are float32 `[hidden_size]`.

    Attributes:
        router: `[streams, hidden_size]`.
        router_norm: The norm of its input.
        prediction: `[streams * streams, streams]`, from the router's output.
        correction: `[streams, streams]`; its bias is 1.
        output_scale: Factors of the active stream for the embeddings per layer, float32
            `[hidden_size]`; None: no factors.
        residual_down: `[rank, hidden_size]`.
        residual_up: `[hidden_size, rank]`.
        residual_norm: The norm of the low-rank product.
    """

    router: Linear
    router_norm: np.ndarray
    prediction: Linear
    correction: Linear
    output_scale: np.ndarray | None
    residual_down: Linear
    residual_up: Linear
    residual_norm: np.ndarray

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix."""
        return [value.weight for value in vars(self).values() if isinstance(value, Linear)]

    def modalities(self, backend: Backend, x: Any, eps: float) -> Any:
        """The router's output for the active stream, `[rows, streams]`."""
        y = self.router.apply(backend, backend.rms_norm(x, self.router_norm, eps))
        return backend.softcap(y, 1.0)

    def predict(self, backend: Backend, streams: Any, spec: ModelSpec) -> Any:
        """Each stream plus the sum of all streams, times coefficients."""
        active = self.active(backend, streams, spec)
        modalities = self.modalities(backend, active, spec.norm_eps)
        return backend.mix(streams, self.prediction.apply(backend, modalities), spec.num_streams)

    def correct(self, backend: Backend, predicted: Any, result: Any, spec: ModelSpec) -> Any:
        """Each predicted stream plus a multiple of the active one's error; `result` is what the
        layer computed for that one."""
        factors = self.correction.apply(backend, self.modalities(backend, result, spec.norm_eps))
        active = backend.scale(self.active(backend, predicted, spec), -1.0)
        error = backend.add(result, active)
        return backend.add(predicted, backend.spread(error, factors, spec.num_streams))

    def active(self, backend: Backend, streams: Any, spec: ModelSpec) -> Any:
        """The active stream."""
        size = spec.hidden_size
        return backend.columns(streams, spec.active_stream * size, size)

    def residual(self, backend: Backend, x: Any, eps: float) -> Any:
        """x plus its normed low-rank product."""
        y = self.residual_up.apply(backend, self.residual_down.apply(backend, x))
        return backend.add(x, backend.rms_norm(y, self.residual_norm, eps))

    def add_embeddings(
        self, backend: Backend, streams: Any, block: PerLayerBlock, inputs: Any, spec: ModelSpec,
        layer: LayerSpec,
    ) -> Any:  # fmt: skip
        """The streams; the embeddings per layer are added to all but the first."""
        active = self.active(backend, streams, spec)
        if self.output_scale is not None:
            active = backend.multiply(active, self.output_scale)
        y = block.apply(backend, active, inputs, layer.activation, spec.norm_eps)
        others = np.ones(spec.num_streams, np.float32)
        others[0] = 0.0
        return backend.add(streams, backend.spread(y, others, spec.num_streams))


def as_first_stream(backend: Backend, stream: Any, spec: ModelSpec) -> Any:
    """`stream` in place of the first one; the others are zero."""
    count = spec.num_streams
    return backend.spread(stream, np.eye(1, count, dtype=np.float32)[0], count)


def mean_of_streams(backend: Backend, streams: Any, spec: ModelSpec) -> Any:
    """The mean of the streams, `[rows, hidden_size]`."""
    size = spec.hidden_size
    total = backend.columns(streams, 0, size)
    for index in range(1, spec.num_streams):
        total = backend.add(total, backend.columns(streams, index * size, size))
    return backend.scale(total, 1.0 / spec.num_streams)


def equal_streams(backend: Backend, x: Any, spec: ModelSpec) -> Any:
    """The streams before the first layer, which all are the embedding that x starts with."""
    ones = np.ones(spec.num_streams, np.float32)
    return backend.spread(backend.columns(x, 0, spec.hidden_size), ones, spec.num_streams)
