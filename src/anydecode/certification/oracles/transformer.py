"""The operations of a Llama in float64, written apart from the kernels. Oracles run models with
them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anydecode.models.network import Experts, GatedMlp, PlainMlp


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis; -inf gives probability 0."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities: np.ndarray = weights / weights.sum(-1, keepdims=True)
    return probabilities


def rms_norm(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    assert weight is not None
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, positions: Sequence[int] | np.ndarray, base: np.ndarray) -> np.ndarray:
    """Rotary embedding of `[rows, heads, head_dim]`; dimension i is paired with i + head_dim / 2
    and turns by position * `base[i]`."""
    angles = np.asarray(positions, np.float64)[:, None, None] * base
    cosine, sine = np.cos(angles), np.sin(angles)
    left, right = np.split(x, 2, -1)
    return np.concatenate([left * cosine - right * sine, right * cosine + left * sine], -1)


def gated_mlp(x: np.ndarray, mlp: GatedMlp | PlainMlp | Experts) -> np.ndarray:
    """down(silu(gate(x)) * up(x)) of a layer that has one MLP."""
    assert isinstance(mlp, GatedMlp)
    gate, up, down = (part.weight.data for part in (mlp.gate, mlp.up, mlp.down))
    gated = x @ gate.T
    outputs: np.ndarray = (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
    return outputs
