"""Converts the names of RWKV-6 and of RWKV-6 in Qwen2 as they are published, and the vectors and
small matrices of their time mixing, to the layout in which the families read them: vectors without
axes of size 1, and matrices of shape [out, in]."""

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
#: The modules of the time mixing in Qwen2, and those of RWKV-6.
_MODULES = {"q_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
#: The mixtures of the time mixing in Qwen2, which has others first, in the order of RWKV-6.
_ORDER = [3, 1, 2, 0, 4]
#: The matrices that are stored as [in, out]; the last two axes of a stack.
_TRANSPOSED = ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2")
_VECTORS = ("time_decay", *(f"time_maa_{part}" for part in "xwkvrg"))


def is_rwkv6(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of such a model."""
    return config.get("model_type") in ("rwkv6", "rwkv6qwen2")


def to_hf_layout(readers: dict[str, Reader]) -> dict[str, Reader]:
    """The tensors with usual names."""
    result: dict[str, Reader] = {}
    for name, reader in readers.items():
        start = next((start for start in _NAMES if name.startswith(start)), "")
        part = name.rpartition(".")[2]
        before, attention, module = name.partition(".self_attn.")
        if attention:
            if part in ("time_maa_w1", "time_maa_w2"):
                reader = partial(_changed, reader, _reordered)
            own, _, leaf = module.partition(".")
            name = f"{before}.attention.{_MODULES.get(own, own)}{leaf and '.'}{leaf}"
        if part in _TRANSPOSED:
            reader = partial(_changed, reader, lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)))
        elif part in _VECTORS:
            reader = partial(_changed, reader, np.ravel)
        result[_NAMES.get(start, "") + name.removeprefix(start)] = reader
    return result


def _reordered(tensor: np.ndarray) -> np.ndarray:
    """`time_maa_w1` `[hidden_size, 5 * rank]` or `time_maa_w2` `[5, rank, hidden_size]` with the
    mixtures in the order of RWKV-6."""
    if tensor.ndim == 3:
        return tensor[_ORDER]
    return tensor.reshape(len(tensor), len(_ORDER), -1)[:, _ORDER].reshape(tensor.shape)


def _changed(reader: Reader, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    return change(np.asarray(reader()))
