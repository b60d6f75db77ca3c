"""Opens the store for evicted prefixes: in main memory, or in a folder that outlives the process.

Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with
CachedAttention", USENIX ATC 2024, arXiv:2403.19708.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable
from decimal import Decimal
from pathlib import Path
from typing import Any

from anydecode.catalogue import Card, register
from anydecode.engine.costs import identity
from anydecode.errors import InvalidRequestError, quoted
from anydecode.kernels.interface import KeyValues
from anydecode.memory.spill import DiskSpill, MemorySpill, Spill
from anydecode.version import __version__

#: In place of a folder: the main memory.
MEMORY = "memory"

_BYTES = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([kmgt]?)(?:i?b)?\s*")
_MAX_BYTES = (1 << 63) - 1
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """A number of bytes from 0 to 2**63 - 1: 1000000, "512MiB", "4g". Raises
    `InvalidRequestError`."""
    found = _BYTES.fullmatch(text.lower()) if isinstance(text, str) else None
    size = text if type(text) is int else -1
    if found is not None:
        size = int(Decimal(found[1]) * _UNITS[found[2]])
    if not 0 <= size <= _MAX_BYTES:
        raise InvalidRequestError(
            f"{quoted(text)} is not a number of bytes such as 4GiB; allowed are 0 to 2**63 - 1"
        )
    return size


@register(
    Card(
        "prefix-spill",
        "serving",
        paper="Gao et al. 2024, CachedAttention, arXiv:2403.19708",
        exactness="token-exact",
        use="LLM(prefix_spill='memory') or anydecode serve --prefix-spill memory; also for the"
        " workers of a fleet",
        summary="Evicted prefixes are stored in main memory or on disk and restored bit by bit.",
        deviations=(
            "a block is written when its slots are reused; it is read from its file while the"
            " request waits for admission, else when it starts",
            "layers are loaded from main memory; a block is read from its file whole, since its"
            " checksum covers all of it",
            "layers are loaded in groups that take about 5 ms to compute; on GPUs, and where a pass"
            " cannot be divided by layers, before the pass",
            "of blocks that several waiting requests need, the first of them counts",
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
    """Open a spill.

    Args:
        where: "memory" or a folder. Blocks in a folder belong to `model` (file, backend, build of
            the kernels, number of threads) and to the layout of `cache`. Blocks of models that were
            not loaded from a file are not found by other processes.
        limit: Maximum size: a number of bytes, or a text such as "4GiB".
        model: The target model.
        cache: Its key-value cache.
    """
    size = parse_bytes(limit)
    if str(where) == MEMORY:
        return MemorySpill(size)
    return DiskSpill(spill_folder(where), size, _identity(model, cache))


def spill_folder(where: str | Path) -> Path:
    """The absolute path of a folder for blocks, which is created if it is missing.

    Raises:
        InvalidRequestError: It cannot be created.
    """
    try:
        folder = Path(where).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(
            f"the spill folder {where} cannot be used: {error.strerror}"
        ) from None
    except (TypeError, ValueError, RuntimeError) as error:  # no path; a user without a home folder
        raise InvalidRequestError(
            f"prefix_spill={where!r} is no folder: {error}; give a folder or 'memory'"
        ) from None
    return folder


def _identity(model: Any, cache: KeyValues | None) -> str:
    facts: dict[str, Any] = {"version": __version__}
    if getattr(model, "path", None):
        facts |= identity(model)
        facts["kernels"] = getattr(model.executor, "kernels", None)
    else:
        facts["object"] = f"{id(model)}"
    if cache is not None:
        tensors = cache.arrays
        facts["layout"] = [f"{one.dtype} {tuple(one.shape[1:])}" for one in tensors]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def stable_name(namespace: Hashable) -> str | None:
    """A name of the namespace (adapter, tenant) that is the same in every process; None with an
    adapter, whose index may differ in another process."""
    adapter, tenant = namespace if isinstance(namespace, tuple) else (-1, namespace)
    return f"tenant {tenant!r}" if adapter == -1 else None
