"""Loads a `Checkpoint` from a name or a path. Resolving and pulling names do not import torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from anydecode.errors import CheckpointError
from anydecode.models.files import untrusted
from anydecode.models.loading.gguf_split import first_parts
from anydecode.models.loading.names import is_adapter, present, resolve
from anydecode.models.loading.pull import PullError, pull

if TYPE_CHECKING:
    from anydecode.models.checkpoint import Checkpoint

__all__ = ["PullError", "load_checkpoint", "present", "pull", "resolve"]


def load_checkpoint(path_or_name: str | os.PathLike[str]) -> Checkpoint:
    """Load a checkpoint.

    Args:
        path_or_name: A folder, a `.gguf` file, or a name for `resolve`. For the folder of an
            adapter, its base model is loaded with the adapter merged into the weights.

    Raises:
        ModelNotFoundError: There is no model of this name.
        CheckpointError: The files are truncated, corrupt, unsafe or unsupported.
    """
    from anydecode.models.loading.gguf import load_gguf
    from anydecode.models.loading.safetensors import load_folder

    path = resolve(path_or_name)
    with untrusted(path):
        if path.is_file():
            return load_gguf(path)
        if is_adapter(path):
            from anydecode.models.loading.adapted import load_adapted

            return load_adapted(path)
        ggufs = [Path(name) for name in first_parts(map(str, sorted(path.glob("*.gguf"))))]
        if (path / "config.json").is_file() or not ggufs:
            return load_folder(path)
        if len(ggufs) > 1:
            listed = ", ".join(file.name for file in ggufs[:8])
            raise CheckpointError(
                f"{path}: contains several GGUF files; give the path of one: {listed}"
            )
        return load_gguf(ggufs[0])
