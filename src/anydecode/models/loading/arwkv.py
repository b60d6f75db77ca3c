"""Converts the names of ARWKV as it is published, and the vectors and small matrices of its time
mixing, to those of RWKV-7 in the layout of flash-linear-attention: vectors without axes of size 1,
and matrices of shape [out, in]."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from anydecode.models.loading.lazy import Reader

_MODULES = {
    "receptance": "r_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "ln_x": "g_norm",
}
#: The tensors of a low-rank product, by number.
_PRODUCTS = {
    f"{part}{number}": f"{part}_lora.lora.{leaf}"
    for part in "wavg"
    for number, leaf in enumerate(("2.bias", "0.weight", "2.weight"))
}


def is_arwkv(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of such a model."""
    return config.get("model_type") == "rwkv_hybrid"


def to_hf_layout(readers: dict[str, Reader]) -> dict[str, Reader]:
    """The tensors with usual names."""
    result: dict[str, Reader] = {}
    for name, reader in readers.items():
        before, mixer, part = name.partition(".self_attn.time_mixer.")
        if not mixer:
            result[name] = reader
            continue
        module, dot, leaf = part.partition(".")
        target = _PRODUCTS.get(part, f"{_MODULES.get(module, module)}{dot}{leaf}")
        if part in _PRODUCTS or part in ("k_k", "k_a"):
            reader = partial(_transposed, reader)
        result[f"{before}.attn.{target}"] = reader
    return result


def _transposed(reader: Reader) -> np.ndarray:
    """A matrix with its axes exchanged, or a vector without axes of size 1."""
    tensor = np.asarray(reader())
    return np.ascontiguousarray(tensor.T) if tensor.ndim == 2 else tensor.ravel()
