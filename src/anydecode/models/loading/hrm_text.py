"""Splits the matrices of HRM-Text's published checkpoints that have the gate, queries, keys and
values of the attention, and names them as `transformers` does."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.loading.lazy import Reader

_FUSED, _OUTPUT = ".attn.gqkv_proj.weight", ".attn.o_proj.weight"


def is_hrm_text(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of such a model."""
    return config.get("model_type") == "hrm_text"


def to_hf_layout(readers: dict[str, Reader]) -> dict[str, Reader]:
    """The tensors with usual names."""
    result: dict[str, Reader] = {}
    for name, reader in readers.items():
        if not name.endswith(_FUSED):
            result[name.replace(_OUTPUT, ".self_attn.o_proj.weight")] = reader
            continue
        for index, part in enumerate(("gate", "q", "k", "v")):
            target = f"{name.removesuffix(_FUSED)}.self_attn.{part}_proj.weight"
            result[target] = partial(_quarter, reader, name, index)
    return result


def _quarter(reader: Reader, name: str, index: int) -> np.ndarray:
    tensor = np.asarray(reader())
    if len(tensor) % 4:
        raise CheckpointError(f"tensor {name} has {len(tensor)} rows, not those of four matrices")
    return np.split(tensor, 4)[index]
