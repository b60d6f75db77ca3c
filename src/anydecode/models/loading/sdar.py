"""The block size of SDAR checkpoints. Their configs lack it; some of their names end with it
(JetLM/SDAR-8B-Chat-b32)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_NAME = re.compile(r".*sdar.*-b([1-9]\d*)", re.IGNORECASE)


def with_block_size(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Add `block_size` to a config that lacks it, from the folder's name, if it is there. In the
    hub's cache, the name of the repository is two folders up."""
    if config.get("model_type") not in ("sdar", "sdar_moe") or config.get("block_size") is not None:
        return config
    for name in (path.name, path.parent.parent.name):
        found = _NAME.fullmatch(name)
        if found is not None:
            return {**config, "block_size": int(found[1])}
    return config
