"""Prefixes that outlive their slots, and the process.

Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with
CachedAttention", USENIX ATC 2024, arXiv:2403.19708.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from anydecode import __version__
from anydecode.catalogue import Card, register
from anydecode.engine.costs import identity
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import KeyValues
from anydecode.memory.spill import DiskSpill, MemorySpill, Spill

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """A number of bytes: 1000000, "512MiB", "4g". Raises `InvalidRequestError`."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if found is None:
        raise InvalidRequestError(f"{text!r} is no number of bytes, as 4GiB is")
    return int(float(found[1]) * _UNITS[found[2]])


@register(
    Card(
        "prefix-spill",
        "serving",
        paper="Gao et al. 2024, CachedAttention, arXiv:2403.19708",
        exactness="token-exact",
        summary="Evicted prefixes go to main memory or disk and come back bit by bit.",
        deviations=(
            "a block is written when its slots are taken, and read when a prompt wants it: nothing"
            " is fetched ahead of the queue or layer by layer",
            "contexts are not truncated within a conversation, so keys keep their positions",
        ),
    )
)
def open_spill(
    where: str | Path = "memory",
    limit: str | int = "4GiB",
    model: Any = None,
    cache: KeyValues | None = None,
) -> Spill:
    """A spill in "memory" or in a folder. Blocks in a folder belong to `model` (the file, who runs
    it, on how many threads) and to the layout of `cache`; those of models that did not come from a
    file are not found by another process."""
    size = parse_bytes(limit)
    if str(where) == "memory":
        return MemorySpill(size)
    return DiskSpill(Path(where).expanduser(), size, _identity(model, cache))


def _identity(model: Any, cache: KeyValues | None) -> str:
    facts: dict[str, Any] = {"version": __version__}
    if getattr(model, "path", None):
        facts |= identity(model)
        library = getattr(model.executor, "_library", None)
        facts["variant"] = getattr(library, "variant", None)
    else:
        facts["object"] = f"{id(model)}"
    if cache is not None:
        tensors = [*cache.keys, *cache.values]
        facts["layout"] = [f"{one.dtype} {tuple(one.shape[1:])}" for one in tensors]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def stable_name(namespace: Hashable) -> str | None:
    """The name of (adapter, tenant) in every process; None with an adapter, whose number another
    process may give to something else."""
    adapter, tenant = namespace if isinstance(namespace, tuple) else (-1, namespace)
    return f"tenant {tenant!r}" if adapter == -1 else None
