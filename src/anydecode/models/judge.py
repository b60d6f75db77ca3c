"""A linear head on a model's last hidden state that says whether the token of that state may stand
where it stands.

Bachmann et al., "Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model
Alignment", arXiv:2501.19309. No heads are published. A safetensors file has `weights`
`[hidden_size]`, `bias` `[1]` and `threshold` `[1]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.exit_files import check_model
from anydecode.models.network import Network
from anydecode.models.tensor_file import read_tensors

#: The file of a model's folder that has its judge.
FILE_NAME = "judge.safetensors"


@dataclass(frozen=True, eq=False)
class Judge:
    """sigmoid(weights . state + bias).

    Attributes:
        weights: float32 `[hidden_size]`.
        bias: A number.
        threshold: The probability above which a draft is accepted, from 0 to 1.
        fingerprint: That of the model (`model_fingerprint`).
    """

    weights: np.ndarray
    bias: float
    threshold: float
    fingerprint: str

    def __call__(self, state: np.ndarray) -> float:
        """The probability that the token of `state`, the last hidden state after the final norm,
        float32 `[hidden_size]`, is right."""
        logit = (self.weights * state).sum(dtype=np.float64) + self.bias
        return float(0.5 * (1 + np.tanh(0.5 * logit)))

    def check(self, network: Network) -> None:
        """Raise InvalidRequestError unless the judge is that of `network`."""
        widths = {len(self.weights)}
        check_model(self.fingerprint, network, "weights of a judge", "judge", widths=widths)

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        from safetensors.numpy import save_file

        tensors = {
            "weights": np.ascontiguousarray(self.weights, np.float32),
            "bias": np.array([self.bias], np.float32),
            "threshold": np.array([self.threshold], np.float32),
        }
        save_file(tensors, path, metadata={"fingerprint": self.fingerprint})

    @staticmethod
    def load(path: Path) -> Judge:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        names = "weights", "bias", "threshold"
        tensors, metadata = read_tensors(path, "judge", names)
        weights, bias, threshold = (tensors[name] for name in names)
        if weights.ndim != 1 or bias.shape != (1,) or threshold.shape != (1,):
            shapes = [tensors[name].shape for name in names]
            raise CheckpointError(
                f"judge {path}: weights, bias and threshold have the shapes {shapes}; allowed are"
                " [hidden_size], [1] and [1]"
            )
        if not 0 <= threshold[0] <= 1:
            raise CheckpointError(
                f"judge {path}: the threshold is {threshold[0]}; allowed is a number from 0 to 1"
            )
        fingerprint = metadata.get("fingerprint", "")
        return Judge(weights, float(bias[0]), float(threshold[0]), fingerprint)
