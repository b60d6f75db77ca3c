"""Safetensors files of small trained parts: routers, heads, maps, prompt tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from anydecode.errors import CheckpointError


def read_tensors(
    path: str | os.PathLike[str],
    what: str,
    names: Iterable[str] = (),
    dtype: type[np.floating] = np.float32,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors file as `dtype`, and its metadata.

    Args:
        path: The file.
        what: What the file has, for errors.
        names: Tensors that it must have.
        dtype: The type of the arrays.

    Raises:
        CheckpointError: There is no such file, it has not all these tensors, or numbers that are
            not finite.
    """
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(path):
        raise CheckpointError(f"{what} {path}: there is no such file")
    try:
        with safe_open(path, "np") as file:
            tensors = {
                name: np.asarray(file.get_tensor(name), dtype)
                for name in file.keys()  # noqa: SIM118
            }
            metadata = dict(file.metadata() or {})
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise CheckpointError(f"{what} {path}: {error}") from None
    if missing := [name for name in names if name not in tensors]:
        raise CheckpointError(f"{what} {path}: has no tensor {', '.join(missing)}")
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        raise CheckpointError(f"{what} {path}: has numbers that are not finite")
    return tensors, metadata
