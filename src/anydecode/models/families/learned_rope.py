"""Rotary frequencies with learned factors (Mistral Large 4)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from anydecode.kernels import portable
from anydecode.kernels.interface import Rope
from anydecode.models.families.weights import TensorReader
from anydecode.models.spec import ModelSpec

_NAME = "rotary_emb.alpha"


def with_learned_rope(reader: TensorReader, spec: ModelSpec) -> ModelSpec:
    """The architecture with the factors of a checkpoint, whose logarithms are a tensor of as many
    numbers as there are frequencies.

    Raises:
        CheckpointError: The tensor is missing or has another shape.
    """
    ropes: dict[Rope | None, Rope | None] = {None: None}
    for layer in spec.layers:
        if layer.rope not in ropes:
            assert layer.rope is not None, "a key of the dictionary"
            frequencies = layer.rope.frequencies
            factors = portable.exp(reader.vector(_NAME, frequencies.size))
            learned = (frequencies * factors).astype(np.float32)
            ropes[layer.rope] = replace(layer.rope, frequencies=learned)
    layers = tuple(replace(layer, rope=ropes[layer.rope]) for layer in spec.layers)
    return replace(spec, layers=layers)
