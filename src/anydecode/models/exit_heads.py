"""Light heads of early exits: a linear map of the state before the model's own norm and head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.exit_files import check_model, read_exits, write_exits
from anydecode.models.network import Network


@dataclass(frozen=True, eq=False)
class ExitHeads:
    """Heads of one model: from a state x, the state x + matrix x + offset, which the model's norm
    and head read.

    Attributes:
        matrices: By number of layers before the exit, float32 `[hidden_size, hidden_size]`.
        offsets: The same, float32 `[hidden_size]`.
        fingerprint: That of the model (`model_fingerprint`).
    """

    matrices: dict[int, np.ndarray]
    offsets: dict[int, np.ndarray]
    fingerprint: str

    @property
    def exits(self) -> list[int]:
        """Numbers of layers, ascending."""
        return sorted(self.matrices)

    def __call__(self, exit: int, states: np.ndarray) -> np.ndarray:
        """What the model's norm and head read, float32 `[rows, hidden_size]`, from states after
        `exit` layers, of the same shape."""
        mapped: np.ndarray = states + states @ self.matrices[exit].T + self.offsets[exit]
        return mapped

    def check(self, network: Network) -> None:
        """Raise InvalidRequestError unless the heads are those of `network`."""
        widths = {len(offset) for offset in self.offsets.values()}
        check_model(
            self.fingerprint, network, "exit heads", "heads", widths=widths, layers=self.exits
        )

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        parts = {"weight": self.matrices, "bias": self.offsets}
        write_exits(path, parts, self.fingerprint)

    @staticmethod
    def load(path: Path) -> ExitHeads:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        (matrices, offsets), metadata = read_exits(path, ("weight", "bias"), "exit heads")
        size = next(iter(offsets.values())).size
        is_valid = all(
            matrices[exit].shape == (size, size) and offsets[exit].shape == (size,)
            for exit in matrices
        )
        if not is_valid:
            raise CheckpointError(f"exit heads {path}: the tensors do not fit together")
        return ExitHeads(matrices, offsets, metadata["fingerprint"])
