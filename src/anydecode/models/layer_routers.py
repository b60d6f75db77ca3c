"""Routers that say of a prompt which layers it needs (FiRST, arXiv:2410.12513): one linear map per
layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.network import Network

#: The file of a model's folder that has its routers.
FILE_NAME = "layer_routers.safetensors"


@dataclass(frozen=True, eq=False)
class LayerRouters:
    """Routers of one model: sigmoid(weight . x + bias) of a layer's input x.

    Attributes:
        layers: The layers that have one, counted from 0, ascending; the others always run.
        weight: float32 `[layers, hidden_size]`.
        bias: float32 `[layers]`.
        fingerprint: That of the model (`model_fingerprint`).
    """

    layers: list[int]
    weight: np.ndarray
    bias: np.ndarray
    fingerprint: str

    def scores(self, layer: int, states: np.ndarray) -> np.ndarray:
        """The logit of each row's probability that it needs `layer`, float64 `[rows]`, from the
        layer's inputs, float32 `[rows, hidden_size]`."""
        index = self.layers.index(layer)
        products: np.ndarray = (states.astype(np.float64) * self.weight[index]).sum(-1)
        return products + self.bias[index]

    def check(self, network: Network) -> None:
        """Raise InvalidRequestError unless the routers are those of `network`."""
        shape = (len(self.layers), network.spec.hidden_size)
        if (
            self.fingerprint != model_fingerprint(network)
            or self.weight.shape != shape
            or not all(0 <= layer < network.spec.num_layers for layer in self.layers)
        ):
            raise InvalidRequestError(
                "these layer routers are those of another model; `anydecode train layer-routers`"
                " makes some for this one"
            )

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        from safetensors.numpy import save_file

        tensors: dict[str, np.ndarray] = {
            "layers": np.array(self.layers, np.int64),
            "weight": np.ascontiguousarray(self.weight, np.float32),
            "bias": np.ascontiguousarray(self.bias, np.float32),
        }
        save_file(tensors, path, metadata={"fingerprint": self.fingerprint})

    @staticmethod
    def load(path: Path) -> LayerRouters:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "np") as file:
                fingerprint = (file.metadata() or {}).get("fingerprint", "")
                layers = np.asarray(file.get_tensor("layers"), np.int64)
                weight, bias = (
                    np.asarray(file.get_tensor(name), np.float32) for name in ("weight", "bias")
                )
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"layer routers {path}: {error}") from None
        if layers.ndim != 1 or weight.ndim != 2 or not len(layers) == len(weight) == bias.size:
            raise CheckpointError(f"layer routers {path}: the tensors do not fit together")
        return LayerRouters(layers.tolist(), weight, bias.reshape(-1), fingerprint)
