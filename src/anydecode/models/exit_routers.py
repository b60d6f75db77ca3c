"""Routers that say of a hidden state whether the layers behind it would change it little
("TIDE: Token-Informed Depth Execution"): one small network per exit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models import mamba_blocks, small_mlps
from anydecode.models.exit_files import ByExit, check_model, read_exits, write_exits
from anydecode.models.mamba_blocks import MambaBlocks, MambaState
from anydecode.models.network import Network
from anydecode.models.small_mlps import SmallMlps

#: The file of a model's folder that has its routers.
FILE_NAME = "exit_routers.safetensors"
#: Added to mean squares under the root, in the norms of routers.
EPS = 1e-5
_BLOCK = tuple(f"block.{part}" for part in small_mlps.PARTS)
_MAMBA = tuple(f"mamba.{part}" for part in mamba_blocks.PARTS)

#: What the routers remember of a text, by exit.
RouterStates = dict[int, MambaState]


@dataclass(frozen=True, eq=False)
class ExitRouters:
    """Routers of one model: sigmoid(up . silu(down x)) of a state x, or of what the feed-forward
    block of a transformer or a block of Mamba makes of it.

    Attributes:
        down: By number of layers before the exit, float32 `[width, hidden_size]`.
        up: The same, float32 `[width]`.
        fingerprint: That of the model (`model_fingerprint`).
        target: What they have learned to predict: "cosine 0.98", whether a state's cosine with the
            last layer's is above that, or "token 3", whether its most probable token is among so
            many of the last layer's.
        block: The feed-forward blocks, whose results are added to a state first, or None.
        mamba: The blocks of Mamba, in their place, or None.
    """

    down: dict[int, np.ndarray]
    up: dict[int, np.ndarray]
    fingerprint: str
    target: str
    block: SmallMlps | None = None
    mamba: MambaBlocks | None = None

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
        return np.array([self._head(exit, state) for state in states])

    def read(self, exit: int, state: np.ndarray, before: RouterStates) -> float:
        """The same of one row, where routers are blocks of Mamba: `before` has what they remember,
        and is changed."""
        assert self.mamba is not None, "routers that remember nothing are called"
        own = before.get(exit) or self.mamba.start(exit)
        added, before[exit] = self.mamba(exit, state, own, EPS)
        return self._head(exit, state + added)

    def _head(self, exit: int, state: np.ndarray) -> float:
        inner = (self.down[exit] * state).sum(-1, dtype=np.float64)
        return float(_sigmoid((self.up[exit] * inner * _sigmoid(inner)).sum()))

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
        for names, blocks in ((_BLOCK, self.block), (_MAMBA, self.mamba)):
            if blocks is not None:
                parts |= {name: getattr(blocks, name.partition(".")[2]) for name in names}
        write_exits(path, parts, self.fingerprint, self.target)

    @staticmethod
    def load(path: Path) -> ExitRouters:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        names = "down.weight", "up.weight"
        (down, up, *parts), metadata = read_exits(path, names, "exit routers", _BLOCK, _MAMBA)
        fits = all(down[exit].ndim == 2 and up[exit].shape == (1, len(down[exit])) for exit in down)
        if not fits:
            raise CheckpointError(f"exit routers {path}: the tensors do not fit together")
        fingerprint, target = metadata["fingerprint"], metadata["target"]
        block, mamba = _blocks(parts, fingerprint)
        for blocks in (block, mamba):
            if blocks is not None:
                blocks.check_shapes(f"exit routers {path}")
                if any(blocks.norm[exit].size != one.shape[1] for exit, one in down.items()):
                    raise CheckpointError(f"exit routers {path}: the tensors do not fit together")
        up = {exit: one[0] for exit, one in up.items()}
        return ExitRouters(down, up, fingerprint, target, block, mamba)


def _blocks(parts: list[ByExit], fingerprint: str) -> tuple[SmallMlps | None, MambaBlocks | None]:
    """The blocks of a file, whose optional parts are `parts`."""
    of_block, of_mamba = parts[: len(_BLOCK)], parts[len(_BLOCK) :]
    block = mamba = None
    if all(of_block):
        named = dict(zip(small_mlps.PARTS, of_block, strict=True))
        block = SmallMlps(**named, fingerprint=fingerprint)
    if all(of_mamba):
        mamba = MambaBlocks(**dict(zip(mamba_blocks.PARTS, of_mamba, strict=True)))
    return block, mamba


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    result: np.ndarray = 0.5 * (1 + np.tanh(0.5 * x))
    return result
