"""Mask tokens at which a model predicts further tokens, with an adapter for their rows alone and a
head that reads the token before.

Samragh et al., "Your LLM Knows the Future: Uncovering Its Multi-Token Prediction Potential",
arXiv:2507.11851. No files are published. A folder has a LoRA adapter in PEFT's layout and
`future_masks.safetensors`, with `masks` `[count, hidden]` and, of the layers `first` and `second`
of the head, `NAME.weight`, `NAME.bias`, `NAME.norm.weight` and `NAME.norm.bias`.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.exit_files import check_model
from anydecode.models.lora import Factors, fit_factors, read_factors
from anydecode.models.network import Network
from anydecode.models.tensor_file import read_tensors

#: The folder of a model's folder that has its mask tokens, and the file with them and the head.
FOLDER_NAME, FILE_NAME = "future_masks", "future_masks.safetensors"
#: Maximum number of mask tokens.
MAX_MASKS = 32
#: Added to the variance by the norms of the head.
NORM_EPS = 1e-5
#: The layers of the head, and the tensors of each.
LAYERS = ("first", "second")
_PARTS = ("weight", "bias", "norm.weight", "norm.bias")


class SamplerLayer(NamedTuple):
    """norm(silu(weight @ x + bias)), where norm is a layer norm; float32."""

    weight: np.ndarray
    bias: np.ndarray
    norm: np.ndarray
    norm_bias: np.ndarray

    def apply(self, x: np.ndarray) -> np.ndarray:
        """The output, float32 `[hidden]`, for the input `x`."""
        y = self.weight @ x + self.bias
        y = y * (0.5 + 0.5 * np.tanh(0.5 * y))
        y = y - y.mean()
        normed: np.ndarray = y / np.sqrt((y * y).mean() + np.float32(NORM_EPS))
        return normed * self.norm + self.norm_bias


@dataclass(frozen=True, eq=False)
class FutureMasks:
    """Trained mask tokens of one model.

    Attributes:
        masks: The embeddings of the masks by their number in a group, float32 `[count, hidden]`.
        first: The layer of the head that reads the embedding of the token before and the mask's
            state, after the final norm, side by side.
        second: The layer behind it, whose output the model's head reads.
        factors: The low-rank updates of the model's matrices in rows of masks, by module.
        fingerprint: That of the model (`model_fingerprint`).
    """

    masks: np.ndarray
    first: SamplerLayer
    second: SamplerLayer
    factors: dict[str, Factors]
    fingerprint: str
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # The index of the adapter in each network that has it.
    _installed: weakref.WeakKeyDictionary[Network, int] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def check(self, network: Network) -> None:
        """Raise InvalidRequestError unless the masks are those of `network`."""
        widths = {self.masks.shape[1]}
        check_model(self.fingerprint, network, "mask tokens", "future-masks", widths=widths)

    def head_inputs(self, embedding: np.ndarray, state: np.ndarray) -> np.ndarray:
        """What the model's head reads of a mask, float32 `[hidden]`, from the embedding of the
        token before and the mask's state."""
        return self.second.apply(self.first.apply(np.concatenate([embedding, state])))

    def adapter_of(self, model: Any) -> int:
        """The index of the masks' adapter in a `Transformer`, to which it is added at the first
        call. It is freed with this object.

        Raises:
            CheckpointError: The factors do not fit the model.
        """
        network = model.network
        with self._lock:
            if network not in self._installed:
                adapter = fit_factors(Path(FOLDER_NAME), self.factors, network)
                index = self._installed[network] = model.install_adapter(adapter)
                weakref.finalize(self, _free, weakref.ref(network), index).atexit = False
            return self._installed[network]

    def save(self, file: Path) -> None:
        """Write the masks and the head; the adapter has files of its own."""
        from safetensors.numpy import save_file

        tensors = {"masks": self.masks}
        for name, layer in zip(LAYERS, (self.first, self.second), strict=True):
            tensors |= {f"{name}.{part}": one for part, one in zip(_PARTS, layer, strict=True)}
        tensors = {name: np.ascontiguousarray(one, np.float32) for name, one in tensors.items()}
        save_file(tensors, file, metadata={"fingerprint": self.fingerprint})

    @staticmethod
    def load(folder: Path) -> FutureMasks:
        """Read a folder, see the module.

        Raises:
            CheckpointError: Files are missing, have other tensors, or numbers that are not finite.
        """
        path = folder / FILE_NAME
        names = ["masks", *(f"{layer}.{part}" for layer in LAYERS for part in _PARTS)]
        tensors, metadata = read_tensors(path, "mask tokens", names)
        masks = tensors["masks"]
        width = masks.shape[-1] if masks.ndim == 2 else 0
        shapes = {"first.weight": (width, 2 * width), "second.weight": (width, width)}
        is_valid = all(tensors[name].shape == shapes.get(name, (width,)) for name in names[1:])
        if not (is_valid and 0 < len(masks) <= MAX_MASKS):
            raise CheckpointError(
                f"mask tokens {path}: allowed are 1 to {MAX_MASKS} masks, and layers of the masks'"
                " size"
            )
        first, second = (
            SamplerLayer(*(tensors[f"{layer}.{part}"] for part in _PARTS)) for layer in LAYERS
        )
        _, factors = read_factors(folder)
        return FutureMasks(masks, first, second, factors, metadata.get("fingerprint", ""))


def _free(network: weakref.ref[Network], index: int) -> None:
    found = network()
    if found is not None:
        found.adapters[index] = {}
