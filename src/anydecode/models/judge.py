"""A linear head on the last hidden states at a token that says whether the token may stand there:
on the target's state (Bachmann et al., "Judge Decoding: Faster Speculative Sampling Requires Going
Beyond Model Alignment", arXiv:2501.19309), or on the draft model's too (Garipov et al., "AutoJudge:
Judge Decoding Without Manual Annotation", arXiv:2504.20039).

A safetensors file has `weights` `[hidden_size]`, `bias` `[1]` and `threshold` `[1]`, and
`draft_weights` `[hidden_size of the draft model]` if the head reads the draft model's states.
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
    """sigmoid(weights . state + draft_weights . draft_state + bias).

    Attributes:
        weights: float32 `[hidden_size]`.
        bias: A number.
        threshold: The probability above which a draft is accepted, from 0 to 1.
        fingerprint: That of the model (`model_fingerprint`).
        draft_weights: float32 `[hidden_size of the draft model]`; None if the draft model's states
            are not read.
        draft_fingerprint: That of the draft model, if its states are read.
    """

    weights: np.ndarray
    bias: float
    threshold: float
    fingerprint: str
    draft_weights: np.ndarray | None = None
    draft_fingerprint: str = ""

    def __call__(self, state: np.ndarray, draft_state: np.ndarray | None = None) -> float:
        """The probability that a token is right.

        Args:
            state: The model's last hidden state at the token, after the final norm, float32
                `[hidden_size]`.
            draft_state: The same of the draft model; used only if the judge reads it.
        """
        logit = (self.weights * state).sum(dtype=np.float64) + self.bias
        if self.draft_weights is not None:
            logit += (self.draft_weights * draft_state).sum(dtype=np.float64)
        return float(0.5 * (1 + np.tanh(0.5 * logit)))

    def check(self, network: Network) -> None:
        """Raise InvalidRequestError unless the judge is that of `network`."""
        widths = {len(self.weights)}
        check_model(self.fingerprint, network, "weights of a judge", "judge", widths=widths)

    def check_draft(self, network: Network) -> None:
        """Raise InvalidRequestError unless `network` is the draft model whose states are read."""
        widths = set() if self.draft_weights is None else {len(self.draft_weights)}
        what = "weights of a judge for the draft model's states"
        check_model(self.draft_fingerprint, network, what, "judge", widths=widths)

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        from safetensors.numpy import save_file

        tensors = {
            "weights": np.ascontiguousarray(self.weights, np.float32),
            "bias": np.array([self.bias], np.float32),
            "threshold": np.array([self.threshold], np.float32),
        }
        metadata = {"fingerprint": self.fingerprint}
        if self.draft_weights is not None:
            tensors["draft_weights"] = np.ascontiguousarray(self.draft_weights, np.float32)
            metadata["draft_fingerprint"] = self.draft_fingerprint
        save_file(tensors, path, metadata=metadata)

    @staticmethod
    def load(path: Path) -> Judge:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        names = "weights", "bias", "threshold"
        tensors, metadata = read_tensors(path, "judge", names)
        weights, bias, threshold = (tensors[name] for name in names)
        draft_weights = tensors.get("draft_weights")
        is_vector = weights.ndim == 1 and (draft_weights is None or draft_weights.ndim == 1)
        if not is_vector or bias.shape != (1,) or threshold.shape != (1,):
            shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in tensors.items())
            raise CheckpointError(
                f"judge {path}: the shapes are {shapes}; allowed are weights [hidden_size],"
                " bias [1], threshold [1] and draft_weights [hidden_size of the draft model]"
            )
        if not 0 <= threshold[0] <= 1:
            raise CheckpointError(
                f"judge {path}: the threshold is {threshold[0]}; allowed is a number from 0 to 1"
            )
        fingerprint, drafts = (metadata.get(f"{of}fingerprint", "") for of in ("", "draft_"))
        numbers = float(bias[0]), float(threshold[0])
        return Judge(weights, *numbers, fingerprint, draft_weights, drafts)
