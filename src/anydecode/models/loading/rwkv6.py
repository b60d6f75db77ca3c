"""Converts the names of RWKV-6 as it is published, and the vectors and small matrices of its time
mixing, to the layout in which the family reads them: vectors without axes of size 1, and matrices
of shape [out, in]."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from anydecode.models.loading.lazy import Reader

#: The starts of names, and the usual ones.
_NAMES = {
    "rwkv.embeddings.": "model.embeddings.",
    "rwkv.blocks.": "model.layers.",
    "rwkv.ln_out.": "model.norm.",
    "head.": "lm_head.",
}
#: The matrices that are stored as [in, out]; the last two axes of a stack.
_TRANSPOSED = ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2")
_VECTORS = ("time_decay", *(f"time_maa_{part}" for part in "xwkvrg"))


def is_rwkv6(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of such a model."""
    return config.get("model_type") == "rwkv6"


def to_hf_layout(readers: dict[str, Reader]) -> dict[str, Reader]:
    """The tensors with usual names."""
    result: dict[str, Reader] = {}
    for name, reader in readers.items():
        start = next((start for start in _NAMES if name.startswith(start)), "")
        part = name.rpartition(".")[2]
        if part in _TRANSPOSED:
            reader = partial(_changed, reader, lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)))
        elif part in _VECTORS:
            reader = partial(_changed, reader, np.ravel)
        result[_NAMES.get(start, "") + name.removeprefix(start)] = reader
    return result


def _changed(reader: Reader, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    return change(np.asarray(reader()))
