"""Reads the small files of a checkpoint. Files are untrusted: whatever is wrong with one becomes a
`CheckpointError`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anydecode.errors import AnydecodeError, CheckpointError
from anydecode.models.limits import ConfigError

#: What code raises that meets a value of an unexpected type, size or structure.
_FAULTS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


@contextmanager
def untrusted(path: Path, what: str = "", config: str = "config.json") -> Iterator[None]:
    """Turn any exception that a malformed file causes within the block into a `CheckpointError`
    that names the file.

    The checks of single values say what is allowed. This is the net under them, so that no file
    ends in another exception, or in one that does not say where the fault is.

    Args:
        path: The file or folder that is read.
        what: The part of it, for the message.
        config: The file in the folder `path` that `ConfigError`s are about.
    """
    start = f"{what}: " if what else ""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith(tuple(_starts(path))):
            raise
        file = path / config
        source = file if isinstance(error, ConfigError) and file.is_file() else path
        raise CheckpointError(f"{source}: {start}{error}") from error
    except AnydecodeError:
        raise
    except _FAULTS as error:
        message = f"{path}: {start}malformed: {type(error).__name__}: {error}"
        raise CheckpointError(message) from error


def _starts(path: Path) -> Iterator[str]:
    """The starts of messages that name a file or folder, a file in it, or its model."""
    yield from (f"{path}{end}" for end in (":", ",", " ", os.sep))
    yield from (f"{name}:" for name in (path.name, path.stem))


def folder_name(folder: Path) -> str:
    """The name of a checkpoint: that of its folder or, in the hub's cache, where folders are named
    by commits, that of its repository (owner/name)."""
    if folder.parent.name != "snapshots":
        return folder.name
    return folder.parent.parent.name.removeprefix("models--").replace("--", "/")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        CheckpointError: The file cannot be read, or is not valid UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as UTF-8 text: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing.

    Raises:
        CheckpointError: The file is not valid JSON, or not an object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return content
