"""The block size of SDAR's checkpoints. Their configs lack it; some names end in it
(JetLM/SDAR-8B-Chat-b32)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_NAME = re.compile(r".*sdar.*-b([1-9]\d*)", re.IGNORECASE)


def with_block_size(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config; where it lacks `block_size`, with the one in the folder's name, if any. In the
    hub's cache the repository's name is two folders up."""
    if config.get("model_type") not in ("sdar", "sdar_moe") or config.get("block_size") is not None:
        return config
    for name in (path.name, path.parent.parent.name):
        found = _NAME.fullmatch(name)
        if found is not None:
            return {**config, "block_size": int(found[1])}
    return config
