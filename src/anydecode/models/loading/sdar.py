"""The block size of SDAR checkpoints. Their configs lack it; some of their names end with it
(JetLM/SDAR-8B-Chat-b32)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from anydecode.models.files import folder_name

_NAME = re.compile(r".*sdar.*-b([1-9]\d*)", re.IGNORECASE)


def with_block_size(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Add `block_size` to a config that lacks it, from the folder's name, if it is there."""
    if config.get("model_type") not in ("sdar", "sdar_moe") or config.get("block_size") is not None:
        return config
    found = _NAME.fullmatch(folder_name(path))
    return config if found is None else {**config, "block_size": int(found[1])}
