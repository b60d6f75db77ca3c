"""From a name or a path to a `Checkpoint`."""

from __future__ import annotations

from pathlib import Path

from anydecode.errors import CheckpointError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.loading.gguf import load_gguf

__all__ = ["load_checkpoint", "load_gguf"]


def load_checkpoint(path_or_name: str | Path) -> Checkpoint:
    """The checkpoint in a folder or `.gguf` file, or behind a name that `resolve` knows."""
    return load_gguf(Path(path_or_name))
