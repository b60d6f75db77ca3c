"""Reads the gates of Muse Spark's sums: a sublayer's input and its normed output have factors of
their own, whose squares add up to 1, but for a smallest factor of the input."""

from __future__ import annotations

import numpy as np

from anydecode.kernels import portable
from anydecode.models.families.values import Config, value_or
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import number
from anydecode.models.network import LayerWeights

_MIN_SQUARE = 1e-3


def read_residual_gates(
    reader: TensorReader, config: Config, layer: str, weights: LayerWeights, hidden: int
) -> None:
    """Read the gates of one layer, and the factors of its MLP's output, into `weights`.

    Args:
        reader: The checkpoint's tensors.
        config: The config.
        layer: The layer's name.
        weights: Where to put them. The factors of outputs are the weights of their norms.
        hidden: The hidden size.
    """
    key = "residual_gate_temperature"
    temperature = number(key, value_or(config, key, 0.3), 1e-6)
    (
        (weights.attention_residual, weights.attention_post_norm),
        (
            weights.mlp_residual,
            weights.mlp_post_norm,
        ),
    ) = (
        _gate(reader.vector(f"{layer}.post_{part}_residual_gate.gate", hidden), temperature)
        for part in ("attention", "feedforward")
    )
    norm = f"{layer}.post_feedforward_layernorm.weight"
    weights.mlp_factors = reader.vector(norm, hidden, 1.0)


def _gate(stored: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """The factors of a sublayer's input and of its output."""
    logits = stored.astype(np.float64) / temperature
    share = 1.0 / (1.0 + portable.exp(-logits))
    kept = np.sqrt(np.maximum((1.0 - share) * (1.0 + share), _MIN_SQUARE))
    return kept.astype(np.float32), share.astype(np.float32)
