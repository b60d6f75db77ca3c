"""Arrays that may be on another device: reading and writing them from main memory. torch is
imported only for such arrays."""

from __future__ import annotations

import importlib.util

import numpy as np

from anydecode.kernels.interface import Array


def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def to_host(array: Array) -> np.ndarray:
    """The array in main memory; a copy only if it is on another device."""
    if isinstance(array, np.ndarray):
        return array
    from anydecode.kernels.torch_arrays import as_numpy

    return as_numpy(array)


def copied(array: Array) -> Array:
    """A copy of the array, on the same device."""
    if isinstance(array, np.ndarray):
        return array.copy()
    return array.clone()


def store(array: Array, index: np.ndarray, values: np.ndarray) -> None:
    """`array[index] = values`, with values of the array's dtype."""
    if isinstance(array, np.ndarray):
        array[index] = values
    else:
        from anydecode.kernels.torch_arrays import as_tensor

        array[as_tensor(index.astype(np.int64), array.device)] = as_tensor(values, array.device)


def select(array: Array, index: np.ndarray) -> np.ndarray:
    """`array[index]` in main memory."""
    if isinstance(array, np.ndarray):
        return array[index]
    from anydecode.kernels.torch_arrays import as_numpy, as_tensor

    return as_numpy(array[as_tensor(index.astype(np.int64), array.device)])
