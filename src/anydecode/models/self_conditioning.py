"""Self-conditioning: what a diffusion model predicted in the last pass is an input of the next one
(Chen et al., "Analog Bits", arXiv:2208.04202; here as in DiffusionGemma and LFM2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from anydecode.kernels.arithmetic import RowArithmetic
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.linear import Linear
from anydecode.models.spec import ModelSpec

#: Tokens whose embeddings are multiplied at a time.
_CHUNK = 4096


@dataclass(eq=False)
class SelfConditioning:
    """A gated MLP (GELU) of the expected embeddings of the last pass, which is added to the
    embeddings of the canvas.

    Attributes:
        norm: Of the expected embeddings, float32 `[hidden_size]`.
        gate: `[inner size, hidden_size]`.
        up: `[inner size, hidden_size]`.
        down: `[hidden_size, inner size]`.
    """

    norm: np.ndarray
    gate: Linear
    up: Linear
    down: Linear

    def __post_init__(self) -> None:
        # No kernel reads them, so they are not packed.
        self._gate, self._up, self._down = (
            _transposed(linear.weight) for linear in (self.gate, self.up, self.down)
        )

    def inputs(
        self, embedded: np.ndarray, expected: np.ndarray | None, spec: ModelSpec
    ) -> np.ndarray:
        """The inputs of the first layer.

        Args:
            embedded: The embeddings of the canvas's tokens, float32 `[rows, hidden_size]`.
            expected: The expected embeddings of the last pass; None in the first one.
            spec: The architecture.

        Returns:
            float32 `[rows, hidden_size]`.
        """
        rows = RowArithmetic()
        expected = np.zeros_like(embedded) if expected is None else expected
        normed = rows.rms_norm(expected, self.norm, spec.norm_eps)
        gated = _gelu_tanh(normed @ self._gate) * (normed @ self._up)
        result: np.ndarray = rows.rms_norm(embedded + gated @ self._down, None, spec.norm_eps)
        return result


@dataclass(eq=False)
class PlainSelfConditioning:
    """Two matrices with SiLU between them, whose output for the expected embeddings of the last
    pass is added to the embeddings of the canvas (LFM2's diffusion models).

    Attributes:
        norm: Of the expected embeddings, float32 `[hidden_size]`.
        first: `[hidden_size, hidden_size]`.
        second: `[hidden_size, hidden_size]`.
    """

    norm: np.ndarray
    first: Linear
    second: Linear

    def __post_init__(self) -> None:
        self._first, self._second = _transposed(self.first.weight), _transposed(self.second.weight)

    def inputs(
        self, embedded: np.ndarray, expected: np.ndarray | None, spec: ModelSpec
    ) -> np.ndarray:
        """See `SelfConditioning.inputs`. The first pass adds nothing."""
        if expected is None:
            return embedded
        y = RowArithmetic().rms_norm(expected, self.norm, spec.norm_eps) @ self._first
        if self.first.bias is not None:
            y = y + self.first.bias
        result: np.ndarray = embedded + (y / (1 + np.exp(-y))) @ self._second
        return result


def expected_embeddings(
    probabilities: np.ndarray, embed: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """The mean of the embeddings of all tokens under each distribution.

    Args:
        probabilities: float `[rows, vocab_size]`.
        embed: Returns embeddings, float32 `[tokens, hidden_size]`, of int32 tokens.

    Returns:
        float32 `[rows, hidden_size]`.
    """
    weights = probabilities.astype(np.float32)
    parts = (
        weights[:, first : first + _CHUNK]
        @ embed(np.arange(first, min(first + _CHUNK, weights.shape[1]), dtype=np.int32))
        for first in range(0, weights.shape[1], _CHUNK)
    )
    result: np.ndarray = sum(parts)
    return result


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
    result: np.ndarray = np.float32(0.5) * x * (1 + np.tanh(inner))
    return result


def _transposed(weight: Weight) -> np.ndarray:
    matrix: np.ndarray = dequantize(weight).T.copy()
    weight.free()
    return matrix
