"""The secret that the processes of a fleet share."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from anydecode.errors import InvalidRequestError
from anydecode.folders import default_cache

#: The environment variable with the secret, for processes without a file.
VARIABLE = "ANYDECODE_CLUSTER_SECRET"
_MIN_CHARACTERS = 16


def read_secret(file: Path | None, *, can_create: bool = False) -> bytes:
    """The secret of a fleet.

    Args:
        file: The file that contains it; None: that of the environment variable, else a file in the
            cache folder, which only its owner can read.
        can_create: Whether to make a new secret if there is no file.

    Raises:
        InvalidRequestError: There is none, or it is too short.
    """
    value = os.environ.get(VARIABLE)
    path = file or default_cache() / "cluster" / "secret"
    if file is not None or value is None:
        try:
            value = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if not can_create:
                raise InvalidRequestError(
                    f"there is no secret of a fleet in {path}: copy the file from the machine of"
                    " the process to connect to, or name another one (--secret-file; of step-3"
                    " secret_file=)"
                ) from None
            value = _created(path)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"the secret in {path} cannot be read: {error}") from None
    value = value.strip()
    if len(value) < _MIN_CHARACTERS:
        raise InvalidRequestError(
            f"the secret of a fleet has {len(value)} characters; use {_MIN_CHARACTERS} or more"
        )
    return value.encode()


def _created(path: Path) -> str:
    value = secrets.token_hex(32)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another process was faster
        return path.read_text(encoding="utf-8")
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(value + "\n")
    return value
