"""Small MLPs beside those of a model (Duo-LLM, arXiv:2410.10846): one for each layer that has a
choice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.exit_files import ByExit, check_model, read_exits, write_exits
from anydecode.models.network import Network

PARTS = ("norm", "gate", "up", "down")


@dataclass(frozen=True, eq=False)
class SmallMlps:
    """down (silu(gate y) * (up y)) of y = norm(x), for a state x behind a layer's attention.

    Attributes:
        norm: By layer, counted from 0, the weights of an RMS norm, float32 `[hidden_size]`.
        gate: The same, float32 `[width, hidden_size]`.
        up: The same, float32 `[width, hidden_size]`.
        down: The same, float32 `[hidden_size, width]`.
        fingerprint: That of the model (`model_fingerprint`).
    """

    norm: ByExit
    gate: ByExit
    up: ByExit
    down: ByExit
    fingerprint: str

    @property
    def layers(self) -> list[int]:
        """The layers, ascending."""
        return sorted(self.gate)

    def __call__(self, layer: int, states: np.ndarray, eps: float) -> np.ndarray:
        """What the MLP of `layer` adds to states, both float32 `[rows, hidden_size]`."""
        added = np.empty_like(states)
        for row, state in enumerate(states):  # one by one, so that no row depends on the others
            x = state.astype(np.float64)
            x = x / np.sqrt((x * x).mean() + eps) * self.norm[layer]
            gate = (self.gate[layer] * x).sum(-1)
            inner = 0.5 * (1 + np.tanh(0.5 * gate)) * gate * (self.up[layer] * x).sum(-1)
            added[row] = (self.down[layer] * inner).sum(-1)
        return added

    def check(self, network: Network) -> None:
        """Raise InvalidRequestError unless the MLPs are those of `network`."""
        widths = {len(norm) for norm in self.norm.values()}
        check_model(
            self.fingerprint,
            network,
            "small MLPs",
            "depth --recipe duo-llm-mlps",
            widths=widths,
            layers=self.layers,
        )

    def check_shapes(self, what: str) -> None:
        """Raise CheckpointError, about `what`, unless the parts of each MLP fit together."""
        for layer, one in self.gate.items():
            parts = (self.norm[layer], one, self.up[layer], self.down[layer])
            shapes = [part.shape for part in parts]
            size, width = self.norm[layer].size, one.shape[0] if one.ndim else 0
            if shapes != [(size,), (width, size), (width, size), (size, width)]:
                raise CheckpointError(f"{what}: one has the shapes {shapes}")

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        tensors = (self.norm, self.gate, self.up, self.down)
        write_exits(path, dict(zip(PARTS, tensors, strict=True)), self.fingerprint)

    @staticmethod
    def load(path: Path) -> SmallMlps:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        (norm, gate, up, down), metadata = read_exits(path, PARTS, "small MLPs")
        mlps = SmallMlps(norm, gate, up, down, metadata["fingerprint"])
        mlps.check_shapes(f"small MLPs {path}")
        return mlps
