"""The folder for downloaded models, compiled kernels and measurements."""

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
