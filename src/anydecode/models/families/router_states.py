"""Reads routers that are small networks (ZAYA1)."""

from __future__ import annotations

from anydecode.models.families.weights import TensorReader
from anydecode.models.linear import Linear
from anydecode.models.router_states import RouterStates


def read_router_states(
    reader: TensorReader, layer: str, shape: tuple[int, int], eps: float, is_first: bool
) -> RouterStates:
    """The router of the layer `layer`, but for its last matrix.

    Args:
        reader: The checkpoint's tensors.
        layer: The layer's name.
        shape: The router's hidden size, and that of the model.
        eps: Of its norm.
        is_first: Whether it is the first layer, whose router reads no other.
    """
    name, size = f"{layer}.mlp.gate", shape[0]

    # A router is small, and quantising it would change which experts are selected.
    def linear(module: str, columns: int) -> Linear:
        weight = reader.matrix(f"{name}.{module}", (size, columns), keep_format=True)
        return Linear(weight, reader.vector(f"{name}.{module}.bias", size))

    return RouterStates(
        linear("down_proj", shape[1]),
        reader.vector(f"{name}.router_mlp.norm.weight", size),
        linear("router_mlp.fc1", size),
        linear("router_mlp.fc2", size),
        eps,
        None if is_first else reader.vector(f"{name}.router_states_scale", size),
    )
