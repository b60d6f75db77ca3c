"""The time mixing of RWKV-7 (Peng et al., arXiv:2503.14456).

Six mixtures of a row's input and that of the position before give, in this order, the receptance,
the decay, the key, the value, the rate and the gate of a recurrence (see `Recurrence`, "wkv"). The
values of later layers are mixed with those of the first, which its slots store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.kernels.interface import Backend, Recurrence, Weight, WkvWeights
from anydecode.models.linear import Linear


@dataclass(eq=False)
class LowRankProduct:
    """up(activation(down(x))), where the activation is "sigmoid", "tanh" or "identity"."""

    down: Linear
    up: Linear
    activation: str = "identity"

    def apply(self, backend: Backend, x: Any) -> Any:
        """up(activation(down(x)))"""
        y = self.down.apply(backend, x)
        if self.activation == "tanh":
            y = backend.softcap(y, 1.0)
        elif self.activation != "identity":
            y = backend.activate(y, self.activation)
        return self.up.apply(backend, y)


@dataclass(eq=False)
class TimeMixWeights:
    """The weights of time mixing.

    Attributes:
        mixes: The shares of the position before in the six inputs, float32 `[6, hidden_size]`.
        receptance: `[hidden_size, hidden_size]`, as are `key`, `value` and `output`.
        key: Of the keys.
        value: Of the values.
        output: Of the gated outputs of the recurrence.
        decay: Of the decays.
        rate: Of the rates.
        gate: Of the gates.
        value_mix: Of the share of the first layer's value; None in the first layer.
        vectors: The vectors of the recurrence.
    """

    mixes: np.ndarray
    receptance: Linear
    key: Linear
    value: Linear
    output: Linear
    decay: LowRankProduct
    rate: LowRankProduct
    gate: LowRankProduct
    vectors: WkvWeights
    value_mix: LowRankProduct | None = None

    @property
    def products(self) -> dict[str, LowRankProduct]:
        """The low-rank products by name."""
        return {x: y for x, y in vars(self).items() if isinstance(y, LowRankProduct)}

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix of the sublayer."""
        linears = [self.receptance, self.key, self.value, self.output]
        linears += [part for x in self.products.values() for part in (x.down, x.up)]
        return [linear.weight for linear in linears]

    def apply(self, backend: Backend, x: Any, layer: int, shape: Recurrence) -> Any:
        """The output of the sublayer of `layer` for its normed inputs."""
        r, w, k, v, a, g = backend.shift(x, layer, shape, 0, list(self.mixes))
        value = self.value.apply(backend, v)
        if self.value_mix is not None:
            value = self._mixed_value(backend, value, self.value_mix.apply(backend, v), shape)
        gates = (
            self.receptance.apply(backend, r),
            self.decay.apply(backend, w),
            self.key.apply(backend, k),
            value,
            self.rate.apply(backend, a),
        )
        y = backend.recurrence(None, gates, layer, shape, self.vectors)
        y = backend.gated(self.gate.apply(backend, g), y, "identity")
        return self.output.apply(backend, y)

    def _mixed_value(self, backend: Backend, value: Any, share: Any, shape: Recurrence) -> Any:
        """value + sigmoid(share) * (the first layer's value - value)"""
        size = shape.width_out
        first = backend.stored(0, shape, shape.width + 3 * size, size)
        change = backend.add(first, backend.scale(value, -1.0))
        return backend.add(value, backend.gated(share, change, "sigmoid"))
