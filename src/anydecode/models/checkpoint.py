"""A checkpoint as every loader hands it on: a config and tensors in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from anydecode.kernels.interface import Weight
from anydecode.models.tokenizer import Tokenizer


@dataclass(eq=False)
class Checkpoint:
    """`config` has the keys of a Hugging Face `config.json`; `tensors` has Hugging Face names
    (`model.layers.0.self_attn.q_proj.weight`), read only when asked for. Matrices may be packed
    (`Weight`); everything else is a torch tensor."""

    name: str
    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, torch.Tensor | Weight]
    tokenizer: Tokenizer | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
