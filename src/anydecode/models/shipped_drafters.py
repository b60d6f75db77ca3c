"""The drafters in this package, found by the weights of the models that they draft for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from anydecode.models.network import Network

_FOLDER = Path(__file__).parents[1] / "assets" / "drafters"
#: The folder of a drafter by the digest of its target's norms.
_DRAFTERS = {
    "af2d6ecdfd0cf0b5f4b750665f52f4b6c1541012c63e9f58a8acff34d38e9d03": "smollm2-135m-instruct",
}


def norms_digest(network: Network) -> str:
    """The SHA-256 of the norms of a network's layers, which no weight format rounds. Models that
    were tuned with frozen norms (merged adapters) have the digest of their base: a drafter for that
    one drafts for them too, with fewer right drafts."""
    digest = hashlib.sha256()
    for layer in network.weights.layers:
        for norm in (layer.attention_norm, layer.mlp_norm):
            if norm is not None:
                digest.update(np.ascontiguousarray(norm, np.float32).tobytes())
    return digest.hexdigest()


def shipped_drafter(network: Network) -> Path | None:
    """The folder of the drafter for a model, or None."""
    name = _DRAFTERS.get(norms_digest(network))
    return None if name is None else _FOLDER / name
