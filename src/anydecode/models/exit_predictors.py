"""Predictors that say of a draft's candidates whether the most probable token of all layers is
already known (Xu et al., "SpecEE", arXiv:2504.08850): one small network per layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.exit_files import ByExit, check_model, read_exits, write_exits
from anydecode.models.network import Network

#: The file of a model's folder that has its predictors.
FILE_NAME = "exit_predictors.safetensors"
#: Candidates of a draft, and what a predictor reads: their logits, their probabilities among
#: themselves, and the change of these.
NUM_CANDIDATES = 4
NUM_FEATURES = 3 * NUM_CANDIDATES
_PARTS = ("down.weight", "down.bias", "up.weight", "up.bias", "always")


@dataclass(frozen=True, eq=False)
class Predictor:
    """sigmoid(up . relu(down x + down_bias) + up_bias).

    Attributes:
        down: float32 `[width, NUM_FEATURES]`.
        down_bias: float32 `[width]`.
        up: float32 `[width]`.
        up_bias: A number.
    """

    down: np.ndarray
    down_bias: np.ndarray
    up: np.ndarray
    up_bias: float

    def __call__(self, features: np.ndarray) -> float:
        """The probability, from features float64 `[NUM_FEATURES]`."""
        inner = np.maximum((self.down * features).sum(-1) + self.down_bias, 0.0)
        return float(0.5 + 0.5 * np.tanh(0.5 * ((self.up * inner).sum() + self.up_bias)))


@dataclass(frozen=True, eq=False)
class ExitPredictors:
    """Predictors of one model and its drafter.

    Attributes:
        predictors: By number of layers before the exit.
        always: The exits that every token checks; others are checked near recent exits.
        fingerprint: That of the model (`model_fingerprint`).
    """

    predictors: dict[int, Predictor]
    always: frozenset[int]
    fingerprint: str

    @property
    def exits(self) -> list[int]:
        """Numbers of layers, ascending."""
        return sorted(self.predictors)

    def check(self, network: Network) -> None:
        """Raise InvalidRequestError unless the predictors are those of `network`."""
        check_model(self.fingerprint, network, "exit predictors", "depth --recipe specee")
        depth = network.spec.num_layers
        if not all(0 < exit < depth for exit in self.predictors):
            raise InvalidRequestError(
                f"exit predictors behind {self.exits[-1]} layers do not fit a model of {depth}"
            )

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        parts: dict[str, ByExit] = {part: {} for part in _PARTS}
        for exit, one in self.predictors.items():
            is_always, up_bias = np.array([exit in self.always]), np.array([one.up_bias])
            arrays = (one.down, one.down_bias, one.up[None], up_bias, is_always)
            for part, array in zip(_PARTS, arrays, strict=True):
                parts[part][exit] = np.asarray(array, np.float32)
        write_exits(path, parts, self.fingerprint)

    @staticmethod
    def load(path: Path) -> ExitPredictors:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        (*parts, always), metadata = read_exits(path, _PARTS, "exit predictors")
        predictors = {exit: _predictor(path, *(part[exit] for part in parts)) for exit in always}
        checked = frozenset(exit for exit, one in always.items() if one.any())
        return ExitPredictors(predictors, checked, metadata["fingerprint"])


def _predictor(
    path: Path, down: np.ndarray, down_bias: np.ndarray, up: np.ndarray, up_bias: np.ndarray
) -> Predictor:
    width = down_bias.size
    shapes = [one.shape for one in (down, down_bias, up, up_bias)]
    if shapes != [(width, NUM_FEATURES), (width,), (1, width), (1,)]:
        raise CheckpointError(f"exit predictors {path}: one has the shapes {shapes}")
    return Predictor(down, down_bias, up[0], float(up_bias[0]))
