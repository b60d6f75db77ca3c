"""Predictors that say of a draft's candidates whether the most probable token of all layers is
already known (Xu et al., "SpecEE", arXiv:2504.08850): one small network per layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.network import Network

#: The file of a model's folder that has its predictors.
FILE_NAME = "exit_predictors.safetensors"
#: Candidates of a draft, and what a predictor reads: their logits, their probabilities among
#: themselves, and the change of these.
NUM_CANDIDATES = 4
NUM_FEATURES = 3 * NUM_CANDIDATES
_PARTS = ("down.weight", "down.bias", "up.weight", "up.bias")


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
        if self.fingerprint != model_fingerprint(network) or not all(
            0 < exit < network.spec.num_layers for exit in self.predictors
        ):
            raise InvalidRequestError(
                "these exit predictors are those of another model; `anydecode train predictors`"
                " makes some for this one"
            )

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        from safetensors.numpy import save_file

        tensors = {}
        for exit, one in self.predictors.items():
            arrays = (one.down, one.down_bias, one.up[None], np.array([one.up_bias]))
            for part, array in zip(_PARTS, arrays, strict=True):
                tensors[f"exits.{exit}.{part}"] = np.ascontiguousarray(array, np.float32)
        always = ",".join(map(str, sorted(self.always)))
        save_file(tensors, path, metadata={"fingerprint": self.fingerprint, "always": always})

    @staticmethod
    def load(path: Path) -> ExitPredictors:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "np") as file:
                metadata = file.metadata() or {}
                found = {
                    name: np.asarray(file.get_tensor(name), np.float32)
                    for name in file.keys()  # noqa: SIM118
                }
            exits = {int(name.split(".")[1]) for name in found}
            predictors = {
                exit: _predictor(*(found[f"exits.{exit}.{part}"] for part in _PARTS))
                for exit in exits
            }
            always = frozenset(map(int, filter(None, metadata.get("always", "").split(","))))
        except (OSError, SafetensorError, ValueError, KeyError, IndexError) as error:
            raise CheckpointError(f"exit predictors {path}: {error}") from None
        if not predictors or not always <= exits:
            raise CheckpointError(f"exit predictors {path}: there are none for some layers")
        return ExitPredictors(predictors, always, metadata.get("fingerprint", ""))


def _predictor(
    down: np.ndarray, down_bias: np.ndarray, up: np.ndarray, up_bias: np.ndarray
) -> Predictor:
    width = len(down_bias)
    shapes = [one.shape for one in (down, down_bias, up, up_bias)]
    if shapes != [(width, NUM_FEATURES), (width,), (1, width), (1,)]:
        raise ValueError(f"a predictor has the shapes {shapes}")
    return Predictor(down, down_bias, up[0], float(up_bias[0]))
