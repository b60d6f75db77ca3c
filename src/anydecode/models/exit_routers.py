"""Routers that say of a hidden state whether the layers behind it would change it little
("TIDE: Token-Informed Depth Execution"): one small network per exit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.exit_files import check_model, read_exits, write_exits
from anydecode.models.network import Network
from anydecode.models.small_mlps import PARTS, SmallMlps

#: The file of a model's folder that has its routers.
FILE_NAME = "exit_routers.safetensors"
#: Added to mean squares under the root, in the norms of routers.
EPS = 1e-5
_BLOCK = tuple(f"block.{part}" for part in PARTS)


@dataclass(frozen=True, eq=False)
class ExitRouters:
    """Routers of one model: sigmoid(up . silu(down x)) of a state x, or of what the feed-forward
    block of a transformer makes of it.

    Attributes:
        down: By number of layers before the exit, float32 `[width, hidden_size]`.
        up: The same, float32 `[width]`.
        fingerprint: That of the model (`model_fingerprint`).
        target: What they have learned to predict: "cosine 0.98", whether a state's cosine with the
            last layer's is above that, or "token 3", whether its most probable token is among so
            many of the last layer's.
        block: What is added to a state first; None: nothing.
    """

    down: dict[int, np.ndarray]
    up: dict[int, np.ndarray]
    fingerprint: str
    target: str
    block: SmallMlps | None = None

    @property
    def exits(self) -> list[int]:
        """Numbers of layers, ascending."""
        return sorted(self.down)

    def __call__(self, exit: int, states: np.ndarray) -> np.ndarray:
        """The probability of each row that the layers behind change it little, float64 `[rows]`,
        from states after `exit` layers, float32 `[rows, hidden_size]`."""
        if self.block is not None:
            states = states + self.block(exit, states, EPS)
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
            self.fingerprint,
            network,
            "exit routers",
            "depth --recipe tide",
            widths=widths,
            layers=self.exits,
        )

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        up = {exit: self.up[exit][None] for exit in self.exits}
        parts = {"down.weight": self.down, "up.weight": up}
        if self.block is not None:
            parts |= {
                name: getattr(self.block, part) for name, part in zip(_BLOCK, PARTS, strict=True)
            }
        write_exits(path, parts, self.fingerprint, self.target)

    @staticmethod
    def load(path: Path) -> ExitRouters:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        names = "down.weight", "up.weight"
        (down, up, *parts), metadata = read_exits(path, names, "exit routers", _BLOCK)
        fits = all(down[exit].ndim == 2 and up[exit].shape == (1, len(down[exit])) for exit in down)
        if not fits:
            raise CheckpointError(f"exit routers {path}: the tensors do not fit together")
        fingerprint, target = metadata["fingerprint"], metadata["target"]
        block = None
        if all(parts):
            block = SmallMlps(**dict(zip(PARTS, parts, strict=True)), fingerprint=fingerprint)
            block.check_shapes(f"exit routers {path}")
            if any(block.norm[exit].size != one.shape[1] for exit, one in down.items()):
                raise CheckpointError(f"exit routers {path}: the tensors do not fit together")
        up = {exit: one[0] for exit, one in up.items()}
        return ExitRouters(down, up, fingerprint, target, block)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    result: np.ndarray = 0.5 * (1 + np.tanh(0.5 * x))
    return result
