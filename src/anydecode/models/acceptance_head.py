"""The weights of a head on a draft model's last hidden state that predicts whether a draft is
accepted (Huang et al., "SpecDec++", arXiv:2405.19715), as they are stored beside the draft model.

A safetensors file has `block` `[hidden_size, hidden_size]`, `block_bias` `[hidden_size]`, `output`
`[2, hidden_size]` and `output_bias` `[2]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.exit_files import check_model
from anydecode.models.network import Network
from anydecode.models.tensor_file import read_tensors

#: The file of a draft model's folder that has its head.
FILE_NAME = "acceptance_head.safetensors"
NAMES = ("block", "block_bias", "output", "output_bias")


@dataclass(frozen=True, eq=False)
class AcceptanceWeights:
    """What `decoders.speculative.acceptance_head.AcceptanceHead` computes with.

    Attributes:
        parameters: float32, by the names above.
        fingerprint: That of the draft model (`model_fingerprint`).
        target_fingerprint: That of the model which accepts the drafts.
    """

    parameters: dict[str, np.ndarray]
    fingerprint: str
    target_fingerprint: str

    def check(self, draft: Network, target: Network) -> None:
        """Raise InvalidRequestError unless the head was trained for `draft`, and for `target`."""
        what, command = "weights of an acceptance head", "acceptance-head"
        widths = {len(self.parameters["block"])}
        check_model(self.fingerprint, draft, f"{what} of a draft model", command, widths=widths)
        check_model(self.target_fingerprint, target, f"{what} of a target", command)

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        from safetensors.numpy import save_file

        tensors = {name: np.ascontiguousarray(self.parameters[name], np.float32) for name in NAMES}
        metadata = {"fingerprint": self.fingerprint, "target": self.target_fingerprint}
        save_file(tensors, path, metadata=metadata)

    @staticmethod
    def load(path: Path) -> AcceptanceWeights:
        """Read the file that `save` writes.

        Raises:
            CheckpointError: There is no such file, or it has other tensors.
        """
        tensors, metadata = read_tensors(path, "acceptance head", NAMES)
        size = tensors["block_bias"].size
        expected = dict(zip(NAMES, [(size, size), (size,), (2, size), (2,)], strict=True))
        if any(tensors[name].shape != shape for name, shape in expected.items()):
            shapes = ", ".join(f"{name} {list(tensors[name].shape)}" for name in NAMES)
            raise CheckpointError(
                f"acceptance head {path}: the shapes are {shapes}; allowed are block [n, n],"
                " block_bias [n], output [2, n] and output_bias [2]"
            )
        parameters = {name: tensors[name] for name in NAMES}
        return AcceptanceWeights(
            parameters, metadata.get("fingerprint", ""), metadata.get("target", "")
        )
