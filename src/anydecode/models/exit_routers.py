"""Routers that say of a hidden state whether the layers behind it would change it little
("TIDE: Token-Informed Depth Execution"): one small network per exit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.exit_files import check_model, read_exits, write_exits
from anydecode.models.network import Network

#: The file of a model's folder that has its routers.
FILE_NAME = "exit_routers.safetensors"


@dataclass(frozen=True, eq=False)
class ExitRouters:
    """Routers of one model: sigmoid(up . silu(down x)).

    Attributes:
        down: By number of layers before the exit, float32 `[width, hidden_size]`.
        up: The same, float32 `[width]`.
        fingerprint: That of the model (`model_fingerprint`).
        target: What they have learned to predict: "cosine 0.98", whether a state's cosine with the
            last layer's is above that, or "token 3", whether its most probable token is among so
            many of the last layer's.
    """

    down: dict[int, np.ndarray]
    up: dict[int, np.ndarray]
    fingerprint: str
    target: str

    @property
    def exits(self) -> list[int]:
        """Numbers of layers, ascending."""
        return sorted(self.down)

    def __call__(self, exit: int, states: np.ndarray) -> np.ndarray:
        """The probability of each row that the layers behind change it little, float64 `[rows]`,
        from states after `exit` layers, float32 `[rows, hidden_size]`."""
        # Row by row and in a fixed order, so that the results do not depend on the batch.
        results = np.empty(len(states))
        for row, state in enumerate(states):
            inner = (self.down[exit] * state).sum(-1, dtype=np.float64)
            results[row] = _sigmoid((self.up[exit] * inner * _sigmoid(inner)).sum())
        return results

    def check(self, network: Network) -> None:
        """Raise InvalidRequestError unless the routers are those of `network`."""
        widths = {down.shape[1] for down in self.down.values()}
        check_model(
            self.fingerprint, network, "exit routers", "routers", widths=widths, layers=self.exits
        )

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        up = {exit: self.up[exit][None] for exit in self.exits}
        write_exits(
            path, {"down.weight": self.down, "up.weight": up}, self.fingerprint, self.target
        )

    @staticmethod
    def load(path: Path) -> ExitRouters:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        (down, up), metadata = read_exits(path, ("down.weight", "up.weight"), "exit routers")
        fits = all(down[exit].ndim == 2 and up[exit].shape == (1, len(down[exit])) for exit in down)
        if not fits:
            raise CheckpointError(f"exit routers {path}: the tensors do not fit together")
        fingerprint, target = metadata["fingerprint"], metadata["target"]
        return ExitRouters(down, {exit: one[0] for exit, one in up.items()}, fingerprint, target)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    result: np.ndarray = 0.5 * (1 + np.tanh(0.5 * x))
    return result
