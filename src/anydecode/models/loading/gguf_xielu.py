"""The activations of Apertus, whose numbers GGUF files have in their metadata."""

from __future__ import annotations

import numpy as np

from anydecode.models.limits import MAX_FACTOR, number, refusal
from anydecode.models.loading.gguf_file import GGUFFile

#: The shapes of the numbers of a layer's activation in the Hugging Face layout. Both layouts have
#: the two factors before their softplus.
_SHAPES: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


def xielu_tensors(file: GGUFFile, num_layers: int) -> dict[str, np.ndarray]:
    """The numbers of all layers' activations, float32, by their names in the Hugging Face layout.

    Raises:
        CheckpointError: A key is missing, or is neither a number nor a list of one per layer.
    """
    tensors: dict[str, np.ndarray] = {}
    for part, shape in _SHAPES.items():
        key = f"xielu.{part}"
        given = file.metadata.get(key)
        values = given if isinstance(given, list) else [given] * num_layers
        name = f"{file.path}: metadata {key}"
        if len(values) != num_layers:
            raise refusal(name, values, f"a number, or a list of {num_layers} numbers")
        for layer, value in enumerate(values):
            array = np.full(shape, number(name, value, -MAX_FACTOR), np.float32)
            tensors[f"model.layers.{layer}.mlp.act_fn.{part}"] = array
    return tensors
