"""Pseudo states: linear maps predict, from a token's state at a layer, those of the tokens behind.

Wu et al., "Parallel Decoding via Hidden Transfer for Lossless Large Language Model Acceleration",
arXiv:2404.12022. No files are published. A safetensors file has `maps` `[count, hidden, hidden]`,
`layers` `[count]`, the number of layers before each, and `accuracies` `[count, ranks]`: how often
the token that a pseudo state predicts is the candidate of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.routes import Guide, RoutedPass, TreeRoute
from anydecode.models.exit_files import check_model
from anydecode.models.network import Network
from anydecode.models.tensor_file import read_tensors

#: The file of a model's folder that has its maps.
FILE_NAME = "hidden_transfer.safetensors"
#: Maximum number of maps, and of ranks.
MAX_MAPS, MAX_RANKS = 16, 64


@dataclass(eq=False)
class TransferGuide(Guide):
    """What the route knows of a row.

    Attributes:
        number: The number of the pseudo state that the row has, from 1; 0: the row is a token.
        source: The guide of the token that the pseudo state is predicted from.
        states: Of a token that is the source of some: its states, by number of layers.
    """

    number: int = 0
    source: TransferGuide | None = None
    states: dict[int, np.ndarray] | None = None


@dataclass(frozen=True, eq=False)
class HiddenTransfer(TreeRoute):
    """Trained maps of one model, and the passes in which pseudo states join the rows of tokens.

    Attributes:
        maps: The maps of the pseudo states by their number, float32 `[count, hidden, hidden]`.
        layers: The number of layers before each, not falling.
        accuracies: float32 `[count, ranks]`, see the module.
        fingerprint: That of the model (`model_fingerprint`).
    """

    maps: np.ndarray
    layers: tuple[int, ...]
    accuracies: np.ndarray
    fingerprint: str
    placeholder: np.ndarray = field(init=False)

    keeps_states = True
    takes_adapters = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "placeholder", np.zeros(self.maps.shape[-1], np.float32))

    def guides(self, num_tokens: int, tokens: Seq[int], parents: Seq[int]) -> list[TransferGuide]:
        guides = [TransferGuide() for _ in range(num_tokens)]
        for token, parent in zip(tokens, parents, strict=True):
            before = guides[num_tokens + parent]  # of parent -1, the text's last token
            source = before.source or before
            guides.append(
                TransferGuide()
                if token >= 0
                else TransferGuide(0, 0, 0, 0, before.number + 1, source)
            )
            if token < 0 and source.states is None:
                source.states = {}
        return guides

    def run(self, routed: RoutedPass) -> None:
        guides: list[TransferGuide] = routed.guides
        numbers = np.array([guide.number for guide in guides])
        done = 0
        for index, layers in enumerate(self.layers):
            routed.run(np.flatnonzero(numbers <= index), done, layers)
            done = layers
            for row, guide in enumerate(guides):
                if guide.states is not None:
                    guide.states[layers] = routed.states[row].copy()
            for row in np.flatnonzero(numbers == index + 1).tolist():
                source = guides[row].source
                assert source is not None and source.states is not None
                routed.states[row] = self.maps[index] @ source.states[layers]
        every = np.arange(len(guides))
        routed.run(every, done, routed.num_layers)
        routed.stop(every, routed.num_layers)

    def check(self, network: Network) -> None:
        """Raise InvalidRequestError unless the maps are those of `network`."""
        what, widths = "maps of hidden states", {self.maps.shape[1]}
        check_model(
            self.fingerprint, network, what, "hidden-transfer", widths=widths, layers=self.layers
        )

    def save(self, file: Path) -> None:
        """Write a safetensors file."""
        from safetensors.numpy import save_file

        tensors: dict[str, np.ndarray] = {
            "maps": np.ascontiguousarray(self.maps, np.float32),
            "layers": np.array(self.layers, np.int64),
            "accuracies": np.ascontiguousarray(self.accuracies, np.float32),
        }
        save_file(tensors, file, metadata={"fingerprint": self.fingerprint})

    @staticmethod
    def load(file: Path) -> HiddenTransfer:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        names = "maps", "accuracies", "layers"
        tensors, metadata = read_tensors(file, "maps of hidden states", names)
        maps, accuracies = tensors["maps"], tensors["accuracies"]
        layers = tuple(int(layer) for layer in tensors["layers"].ravel())
        count = len(layers)
        is_square = maps.ndim == 3 and maps.shape == (count, maps.shape[2], maps.shape[2])
        fits = is_square and accuracies.ndim == 2 and len(accuracies) == count
        if not fits or not (0 < count <= MAX_MAPS and 0 < accuracies.shape[1] <= MAX_RANKS):
            raise CheckpointError(
                f"maps of hidden states {file}: has maps {maps.shape}, {count} layers and"
                f" accuracies {accuracies.shape}; allowed are [count, hidden, hidden], 1 to"
                f" {MAX_MAPS} layers and [count, 1 to {MAX_RANKS}]"
            )
        in_range = (accuracies >= 0).all() and (accuracies.sum(1) <= 1.001).all()
        if not in_range or sorted(layers) != list(layers):
            raise CheckpointError(
                f"maps of hidden states {file}: has accuracies that are not shares, or layers that"
                " fall"
            )
        return HiddenTransfer(maps, layers, accuracies, metadata.get("fingerprint", ""))
