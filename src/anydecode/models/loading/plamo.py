"""Converts the names of PLaMo 2 and 3, and the weights of their norms, which are stored without
constants, to the usual layout."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np

from anydecode.models.loading.lazy import Reader

_LAYER = re.compile(r"model\.layers\.layers\.(\d+)\.([\w.]+)")
_NAMES = {
    "pre_mixer_norm.weight": "input_layernorm.weight",
    "post_mixer_norm.weight": "post_attention_layernorm.weight",
    "pre_mlp_norm.weight": "pre_feedforward_layernorm.weight",
    "post_mlp_norm.weight": "post_feedforward_layernorm.weight",
    **{f"mixer.{part}_proj.weight": f"self_attn.{part}_proj.weight" for part in ("qkv", "o")},
    **{f"mixer.{part}_weight": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{f"mixer.{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{f"mixer.{part}_proj.weight": f"mamba.{part}_proj.weight" for part in ("in", "out", "dt")},
    "mixer.bcdt_proj.weight": "mamba.x_proj.weight",
    "mixer.dt_bias": "mamba.dt_proj.bias",
    "mixer.conv1d.weight": "mamba.conv1d.weight",
    **{f"mixer.{part}_norm_weight": f"mamba.{part.lower()}_layernorm.weight" for part in "BC"},
    "mixer.dt_norm_weight": "mamba.dt_layernorm.weight",
    **{f"mixer.{part}": f"mamba.{part}" for part in ("A_log", "D")},
}
#: What the weights of norms lack.
_CONSTANTS = {
    "pre_mixer_norm.weight": 1.0,
    "post_mixer_norm.weight": 1 / 5,
    "pre_mlp_norm.weight": 1.0,
    "post_mlp_norm.weight": 1 / 5**1.5,
    "mixer.q_norm.weight": 1.0,
    "mixer.k_norm.weight": 1.0,
}


def is_plamo(config: dict[str, Any]) -> bool:
    """Whether a config.json is written in this layout."""
    return config.get("model_type") in ("plamo2", "plamo3")


def to_hf_layout(readers: dict[str, Reader]) -> dict[str, Reader]:
    """The tensors in the usual layout."""
    result: dict[str, Reader] = {}
    for name, reader in readers.items():
        layer = _LAYER.fullmatch(name)
        constant = 1.0 if name == "model.norm.weight" else None
        if layer is not None:
            constant = _CONSTANTS.get(layer[2])
            name = f"model.layers.{layer[1]}.{_NAMES.get(layer[2], layer[2])}"
        result[name] = reader if constant is None else partial(_sum, reader, constant)
    return result


def _sum(reader: Reader, constant: float) -> np.ndarray:
    return np.asarray(reader()).astype(np.float32) + np.float32(constant)
