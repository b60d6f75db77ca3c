"""Reads the small files of a checkpoint. Files are untrusted: whatever is wrong with one becomes a
`CheckpointError`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anydecode.errors import AnydecodeError, CheckpointError

#: What code raises that meets a value of an unexpected type, size or structure.
_FAULTS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


@contextmanager
def untrusted(source: object) -> Iterator[None]:
    """Turn any exception that a malformed file causes within the block into a `CheckpointError`.

    The checks of single values say what is allowed. This is the net under them, so that no file
    ends in another exception.

    Args:
        source: The name of the file, folder or checkpoint, for the message.
    """
    try:
        yield
    except AnydecodeError:
        raise
    except _FAULTS as error:
        raise CheckpointError(f"{source} is malformed: {type(error).__name__}: {error}") from error


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
