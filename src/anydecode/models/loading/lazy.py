"""A mapping from tensor names to tensors that are read on access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight
from anydecode.models.files import untrusted

Reader = Callable[[], "np.ndarray | Weight"]


class MissingTensorError(CheckpointError, KeyError):
    """A checkpoint lacks a tensor. Also a `KeyError`, so that `Mapping.get` works."""

    def __str__(self) -> str:
        return str(self.args[0])


class LazyTensors(Mapping[str, "np.ndarray | Weight"]):
    """Tensors by Hugging Face name. Each look-up reads the tensor; nothing is cached."""

    def __init__(self, path: Path, readers: dict[str, Reader]) -> None:
        self.path = path
        self._readers = readers

    def __getitem__(self, name: str) -> np.ndarray | Weight:
        reader = self._readers.get(name)
        if reader is None:
            raise MissingTensorError(f"{self.path}: the checkpoint has no tensor {name!r}")
        with untrusted(self.path, repr(name)):
            return reader()

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)
