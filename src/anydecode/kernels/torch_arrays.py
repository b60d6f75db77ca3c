"""Conversion between numpy arrays and torch tensors, without a copy on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anydecode.kernels.formats import DTYPES

_BFLOAT16 = DTYPES["BF16"]


def as_tensor(array: Any, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor over the memory of a numpy array, on `device`; a tensor is returned as it is, moved
    if necessary."""
    if not isinstance(array, torch.Tensor):
        is_bfloat16 = array.dtype == _BFLOAT16
        array = torch.from_numpy(array.view(np.int16) if is_bfloat16 else array)
        array = array.view(torch.bfloat16) if is_bfloat16 else array
    return array.to(device)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A numpy array over the memory of a tensor; a copy if the tensor is on another device."""
    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        array: np.ndarray = tensor.numpy()
        return array
    return tensor.view(torch.int16).numpy().view(_BFLOAT16)


class DeviceCopies:
    """Tensors of numpy arrays on one device. An array is copied at its first use and its tensor is
    kept as long as this object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[int, tuple[np.ndarray, torch.Tensor]] = {}

    def __call__(self, array: np.ndarray) -> torch.Tensor:
        if self._device.type == "cpu":
            return as_tensor(array)
        entry = self._tensors.get(id(array))
        if entry is None:
            entry = self._tensors[id(array)] = (array, as_tensor(array, self._device))
        return entry[1]
