"""Reads the factors and biases of ZAYA1's sums: of a sublayer's output, and of what it is added
to."""

from __future__ import annotations

import numpy as np

from anydecode.kernels.formats import plain_weight
from anydecode.kernels.interface import Weight
from anydecode.models.families.weights import TensorReader
from anydecode.models.network import LayerWeights


def read_sum_biases(reader: TensorReader, name: str, layer: LayerWeights, hidden: int) -> None:
    """Read those of the layer `name` into `layer`."""
    (
        (layer.attention_factors, layer.attention_residual, layer.attention_sum_bias),
        (layer.mlp_factors, layer.mlp_residual, layer.mlp_sum_bias),
    ) = (
        _sum(reader, f"{name}.post_{part}_residual_scale", hidden) for part in ("attention", "mlp")
    )


def _sum(reader: TensorReader, name: str, hidden: int) -> tuple[np.ndarray, np.ndarray, Weight]:
    """The factors of output and input, and the sum of both biases times these."""
    (own, shift), (kept, other) = (
        tuple(reader.vector(f"{name}.{part}_{kind}", hidden) for kind in ("scale", "bias"))
        for part in ("hidden_states", "residual")
    )
    return own, kept, plain_weight((own * shift + kept * other)[None])
