"""The time mixing of RWKV-7 (Peng et al., arXiv:2503.14456) and of RWKV-6 (arXiv:2404.05892).

In RWKV-7, six mixtures of a row's input and that of the position before give, in this order, the
receptance, the decay, the key, the value, the rate and the gate of a recurrence (see `Recurrence`,
"wkv"). The values of later layers are mixed with those of the first, which its slots store.

In RWKV-6, five mixtures, whose shares depend on a sixth one, give the decay, the key, the value,
the receptance and the gate ("wkv6"). So they do in RWKV-6 in Qwen2 ("gla").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class TimeMix(ABC):
    """The weights of time mixing."""

    @property
    def products(self) -> dict[str, LowRankProduct]:
        """The low-rank products by name."""
        return {x: y for x, y in vars(self).items() if isinstance(y, LowRankProduct)}

    @property
    def linears(self) -> dict[str, Linear]:
        """The matrices that are no part of a low-rank product, by name."""
        return {x: y for x, y in vars(self).items() if isinstance(y, Linear)}

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix of the sublayer."""
        linears = [*self.linears.values()]
        linears += [part for x in self.products.values() for part in (x.down, x.up)]
        return [linear.weight for linear in linears]

    @abstractmethod
    def apply(self, backend: Backend, x: Any, layer: int, shape: Recurrence) -> Any:
        """The output of the sublayer of `layer` for its normed inputs."""


@dataclass(eq=False)
class TimeMixWeights(TimeMix):
    """The weights of RWKV-7's.

    Attributes:
        mixes: The shares of the position before in the six inputs, float32 `[6, hidden_size]`;
            of the first five, if there is no gate.
        receptance: `[hidden_size, hidden_size]`, as are `key`, `value` and `output`.
        key: Of the keys.
        value: Of the values.
        output: Of the gated outputs of the recurrence.
        decay: Of the decays.
        rate: Of the rates.
        gate: Of the gates; None: there are none (ARWKV).
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
    gate: LowRankProduct | None
    vectors: WkvWeights
    value_mix: LowRankProduct | None = None

    def apply(self, backend: Backend, x: Any, layer: int, shape: Recurrence) -> Any:
        """The output of the sublayer of `layer` for its normed inputs."""
        r, w, k, v, a, *g = backend.shift(x, layer, shape, 0, list(self.mixes))
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
        if self.gate is not None:
            y = backend.gated(self.gate.apply(backend, g[0]), y, "identity")
        return self.output.apply(backend, y)

    def _mixed_value(self, backend: Backend, value: Any, share: Any, shape: Recurrence) -> Any:
        """value + sigmoid(share) * (the first layer's value - value)"""
        size = shape.width_out
        first = backend.stored(0, shape, shape.width + 3 * size, size)
        change = backend.add(first, backend.scale(value, -1.0))
        return backend.add(value, backend.gated(share, change, "sigmoid"))


@dataclass(eq=False)
class DynamicMixWeights(TimeMix):
    """The weights of RWKV-6's.

    Attributes:
        first_mix: The shares of the position before in the input of `mix_down`, float32
            `[hidden_size]`.
        mixes: The constant parts of the shares of decay, key, value, receptance and gate, float32
            `[5, hidden_size]`.
        mix_down: `[5 * rank, hidden_size]`.
        mix_ups: What is added to the shares: of the tangents of equal parts of its product, one
            matrix `[hidden_size, rank]` each.
        receptance: `[hidden_size, hidden_size]`, as are `gate` and `output`.
        key: Of the keys, `[num_groups * head_dim, hidden_size]`, as is `value`.
        value: Of the values.
        gate: Of the gates.
        output: Of the gated outputs of the recurrence.
        decay: Of the decays.
        vectors: The vectors of the recurrence.
        gate_activation: Of the gates: "silu" or "sigmoid".
    """

    first_mix: np.ndarray
    mixes: np.ndarray
    mix_down: Linear
    mix_ups: list[Linear]
    receptance: Linear
    key: Linear
    value: Linear
    gate: Linear
    output: Linear
    decay: LowRankProduct
    vectors: WkvWeights
    gate_activation: str = "silu"

    @property
    def matrices(self) -> list[Weight]:
        return [*super().matrices, *(linear.weight for linear in self.mix_ups)]

    def apply(self, backend: Backend, x: Any, layer: int, shape: Recurrence) -> Any:
        ones = np.ones_like(self.first_mix)
        before, first, *mixed = backend.shift(
            x, layer, shape, 0, [ones, self.first_mix, *self.mixes]
        )
        change = backend.add(before, backend.scale(x, -1.0))
        shares = backend.softcap(self.mix_down.apply(backend, first), 1.0)
        w, k, v, r, g = (
            backend.add(
                part, backend.gated(self._share(backend, shares, index), change, "identity")
            )
            for index, part in enumerate(mixed)
        )
        gates = (
            self.receptance.apply(backend, r),
            self.decay.apply(backend, w),
            self.key.apply(backend, k),
            self.value.apply(backend, v),
        )
        y = backend.recurrence(None, gates, layer, shape, self.vectors)
        y = backend.gated(self.gate.apply(backend, g), y, self.gate_activation)
        return self.output.apply(backend, y)

    @property
    def rank(self) -> int:
        """Numbers of which the change of a share is made."""
        return self.mix_ups[0].weight.in_features

    def _share(self, backend: Backend, shares: Any, index: int) -> Any:
        """What is added to the share of a mixture."""
        own = backend.columns(shares, index * self.rank, self.rank)
        return self.mix_ups[index].apply(backend, own)
