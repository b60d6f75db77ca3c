"""Routers that say of a hidden state whether the layers behind it would change it little
("TIDE: Token-Informed Depth Execution"): one small network per exit."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError, InvalidRequestError
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
    """

    down: dict[int, np.ndarray]
    up: dict[int, np.ndarray]
    fingerprint: str

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
        if self.fingerprint != model_fingerprint(network):
            raise InvalidRequestError(
                "these exit routers are those of another model; `anydecode train routers` makes"
                " some for this one"
            )

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        from safetensors.numpy import save_file

        tensors = {}
        for exit in self.exits:
            tensors[f"exits.{exit}.down.weight"] = self.down[exit]
            tensors[f"exits.{exit}.up.weight"] = self.up[exit][None]
        save_file(tensors, path, metadata={"fingerprint": self.fingerprint})

    @staticmethod
    def load(path: Path) -> ExitRouters:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        from safetensors import SafetensorError, safe_open

        down: dict[int, np.ndarray] = {}
        up: dict[int, np.ndarray] = {}
        try:
            with safe_open(path, "np") as file:
                fingerprint = (file.metadata() or {}).get("fingerprint", "")
                for name in file.keys():  # noqa: SIM118
                    _, exit, part, _ = name.split(".")
                    tensor = np.asarray(file.get_tensor(name), np.float32)
                    if part == "down":
                        down[int(exit)] = tensor
                    else:
                        up[int(exit)] = tensor[0]
        except (OSError, SafetensorError, ValueError, IndexError) as error:
            raise CheckpointError(f"exit routers {path}: {error}") from None
        fits = down.keys() == up.keys() and all(
            down[exit].ndim == 2 and up[exit].shape == down[exit].shape[:1] for exit in down
        )
        if not down or not fits:
            raise CheckpointError(f"exit routers {path}: the tensors do not fit together")
        return ExitRouters(down, up, fingerprint)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    result: np.ndarray = 0.5 * (1 + np.tanh(0.5 * x))
    return result


def model_fingerprint(network: Network) -> str:
    """A hash of the shape and the last norm, which no number format changes."""
    spec, norm = network.spec, network.weights.final_norm
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((spec.num_layers, spec.hidden_size, spec.vocab_size)).encode())
    if norm is not None:
        digest.update(np.asarray(norm, np.float16).tobytes())
    return digest.hexdigest()
