"""Diffusion models whose layers depend on the time of the diffusion: adaLN (Peebles and Xie,
"Scalable Diffusion Models with Transformers", arXiv:2212.09748; here as in MDLM, Duo and GIDD), and
adaLN-single (Chen et al., "PixArt-alpha", arXiv:2310.00426; here as in LFM2's diffusion models)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from anydecode.kernels.formats import plain_weight
from anydecode.kernels.interface import Weight

#: Shift, scale and gate of attention, then of the MLP; shift and scale of the final norm.
LAYER_PARTS, FINAL_PARTS = 6, 2
#: Cosines and sines of a time.
WAVES = 256
_LONGEST_PERIOD = 10000.0


class Affine(NamedTuple):
    """A matrix, float32 `[outputs, inputs]`, and its bias `[outputs]`."""

    weight: np.ndarray
    bias: np.ndarray

    def apply(self, x: np.ndarray) -> np.ndarray:
        """weight @ x + bias, float32 `[outputs]`."""
        result: np.ndarray = self.weight @ x + self.bias
        return result


class Modulation(NamedTuple):
    """A layer at one time: weights and biases of its norms, and factors of the outputs of its
    sublayers, float32 `[hidden_size]`. The names are those of `LayerWeights`."""

    attention_norm: np.ndarray
    attention_norm_bias: np.ndarray
    attention_factors: np.ndarray
    mlp_norm: np.ndarray
    mlp_norm_bias: np.ndarray
    mlp_factors: np.ndarray


class InputModulation(NamedTuple):
    """A whole layer at one time: with y = x * scale + shift, it returns
    x + gate * (layer(y) - y).

    Attributes:
        scale: float32 `[hidden_size]`.
        shift: `[1, hidden_size]`.
        gate: float32 `[hidden_size]`.
    """

    scale: np.ndarray
    shift: Weight
    gate: np.ndarray


class ModulatedInputs(NamedTuple):
    """`LayerWeights.input_modulation` of a layer at one time."""

    input_modulation: InputModulation


#: What changes in the weights of a layer with the time.
LayerAtTime: TypeAlias = Modulation | ModulatedInputs


@dataclass(eq=False)
class TimeConditioning:
    """What the layers' norms and outputs are at each time.

    Attributes:
        first: Of the embedding of times, from the waves of a time.
        second: The same, to the condition.
        layers: Per layer, from the condition to `LAYER_PARTS` vectors of `hidden_size`.
        final: From the condition to `FINAL_PARTS` vectors.
        norms: Per layer, the weights of the norms before attention and the MLP, float32
            `[hidden_size]`.
        final_norm: The weights of the final norm.
    """

    first: Affine
    second: Affine
    layers: list[Affine]
    final: Affine
    norms: list[tuple[np.ndarray, np.ndarray]]
    final_norm: np.ndarray

    def at(self, value: float) -> tuple[list[LayerAtTime], tuple[np.ndarray, np.ndarray | None]]:
        """Each layer where the embedding of times receives `value`, and the weights and the bias of
        the final norm, float32 `[hidden_size]`."""
        condition = self._condition(value)
        layers: list[LayerAtTime] = []
        for affine, (attention_norm, mlp_norm) in zip(self.layers, self.norms, strict=True):
            parts = affine.apply(condition).reshape(LAYER_PARTS, -1)
            attention = attention_norm * (1 + parts[1]), parts[0], parts[2]
            layers.append(Modulation(*attention, mlp_norm * (1 + parts[4]), parts[3], parts[5]))
        shift, scale = self.final.apply(condition).reshape(FINAL_PARTS, -1)
        return layers, (self.final_norm * (1 + scale), shift)

    def _condition(self, value: float) -> np.ndarray:
        return _condition(value, self.first, self.second)


@dataclass(eq=False)
class SharedTimeConditioning:
    """What the layers' inputs and outputs are at each time, where all layers share a matrix.

    Attributes:
        first: Of the embedding of times, from the waves of a time.
        second: The same, to the condition.
        shared: From the condition to scale, shift and gate, `[3 * hidden_size]`.
        layers: What each layer adds to them, float32 `[layers, 3 * hidden_size]`.
        final_norm: The weights of the final norm, which the time does not change.
    """

    first: Affine
    second: Affine
    shared: Affine
    layers: np.ndarray
    final_norm: np.ndarray

    def at(self, value: float) -> tuple[list[LayerAtTime], tuple[np.ndarray, np.ndarray | None]]:
        """Each layer where the embedding of times receives `value`, and the weights of the final
        norm, float32 `[hidden_size]`, which has no bias."""
        shared = self.shared.apply(_condition(value, self.first, self.second))
        layers: list[LayerAtTime] = []
        for added in self.layers:
            scale, shift, gate = (shared + added).reshape(3, -1)
            modulation = InputModulation(1 + scale, plain_weight(shift[None].copy()), 1 + gate)
            layers.append(ModulatedInputs(modulation))
        return layers, (self.final_norm, None)


def _condition(value: float, first: Affine, second: Affine) -> np.ndarray:
    """The condition that is made of a time, float32 `[size]`."""
    rates = np.exp(-np.log(_LONGEST_PERIOD) * np.arange(WAVES // 2) / (WAVES // 2))
    waves = np.concatenate([np.cos(value * rates), np.sin(value * rates)]).astype(np.float32)
    return _silu(second.apply(_silu(first.apply(waves))))


def _silu(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = x / (1 + np.exp(-x))
    return result
