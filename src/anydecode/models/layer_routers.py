"""Routers that say of a prompt which layers it needs (FiRST, arXiv:2410.12513): one linear map per
layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.exit_files import check_model, read_exits, write_exits
from anydecode.models.network import Network

if TYPE_CHECKING:
    from typing_extensions import Self

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
        target: What they choose, if there is a choice: one of `targets`.
    """

    #: What they are called, and the command of `anydecode train` that makes them.
    what: ClassVar[str] = "layer routers"
    command: ClassVar[str] = "depth --recipe first-router"
    targets: ClassVar[tuple[str, ...]] = ("",)

    layers: list[int]
    weight: np.ndarray
    bias: np.ndarray
    fingerprint: str
    target: str = ""

    def scores(self, layer: int, states: np.ndarray) -> np.ndarray:
        """The logit of each row's probability that it needs `layer`, float64 `[rows]`, from the
        layer's inputs, float32 `[rows, hidden_size]`."""
        index = self.layers.index(layer)
        products: np.ndarray = (states.astype(np.float64) * self.weight[index]).sum(-1)
        return products + self.bias[index]

    def check(self, network: Network) -> None:
        """Raise InvalidRequestError unless the routers are those of `network`."""
        widths = {self.weight.shape[1]}
        check_model(
            self.fingerprint, network, self.what, self.command, widths=widths, layers=self.layers
        )

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        weight = dict(zip(self.layers, self.weight.astype(np.float32), strict=True))
        bias = dict(zip(self.layers, self.bias[:, None].astype(np.float32), strict=True))
        write_exits(path, {"weight": weight, "bias": bias}, self.fingerprint, self.target)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors or other routers.
        """
        (weight, bias), metadata = read_exits(path, ("weight", "bias"), cls.what)
        target = metadata["target"]
        if target not in cls.targets:
            raise CheckpointError(
                f"{cls.what} {path}: these are routers of another kind; `anydecode train"
                f" {cls.command}` makes some"
            )
        layers = sorted(weight)
        shapes = {(weight[layer].shape, bias[layer].shape) for layer in layers}
        if shapes != {((weight[layers[0]].size,), (1,))}:
            raise CheckpointError(f"{cls.what} {path}: the tensors do not fit together")
        weights, biases = ([one[layer] for layer in layers] for one in (weight, bias))
        fingerprint = metadata["fingerprint"]
        return cls(layers, np.stack(weights), np.concatenate(biases), fingerprint, target)
