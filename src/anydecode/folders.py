"""The folder for downloaded models, compiled kernels and measurements, and durable renames."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def default_cache() -> Path:
    """`ANYDECODE_HOME` if set, else `anydecode` in the platform's cache folder."""
    home = os.environ.get("ANYDECODE_HOME")
    if home:
        return Path(home).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        base = Path(local) if local else Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "anydecode"


def move_durably(source: Path, target: Path) -> None:
    """Rename a file over `target`. After a crash, `target` has its old content or all of the
    new."""
    with open(source, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
    if sys.platform == "win32":
        return  # which cannot sync folders
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
