"""Diffusion models whose layers depend on the time of the diffusion (adaLN, Peebles and Xie,
"Scalable Diffusion Models with Transformers", arXiv:2212.09748; here as in MDLM, Duo and GIDD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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

    def at(self, value: float) -> tuple[list[Modulation], tuple[np.ndarray, np.ndarray]]:
        """Each layer where the embedding of times receives `value`, and the weights and the bias of
        the final norm, float32 `[hidden_size]`."""
        condition = self._condition(value)
        layers = []
        for affine, (attention_norm, mlp_norm) in zip(self.layers, self.norms, strict=True):
            parts = affine.apply(condition).reshape(LAYER_PARTS, -1)
            attention = attention_norm * (1 + parts[1]), parts[0], parts[2]
            layers.append(Modulation(*attention, mlp_norm * (1 + parts[4]), parts[3], parts[5]))
        shift, scale = self.final.apply(condition).reshape(FINAL_PARTS, -1)
        return layers, (self.final_norm * (1 + scale), shift)

    def _condition(self, value: float) -> np.ndarray:
        rates = np.exp(-np.log(_LONGEST_PERIOD) * np.arange(WAVES // 2) / (WAVES // 2))
        waves = np.concatenate([np.cos(value * rates), np.sin(value * rates)]).astype(np.float32)
        return _silu(self.second.apply(_silu(self.first.apply(waves))))


def _silu(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = x / (1 + np.exp(-x))
    return result
