"""The common result of all checkpoint loaders: config and tensors in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anydecode.kernels.interface import Weight
from anydecode.models.lora import Factors
from anydecode.models.pooling import Pooling
from anydecode.models.tokenizer import Tokenizer


class MatrixUpdate(NamedTuple):
    """The low-rank update of a matrix, `up` `[out_features, rank]` @ `down` `[rank, in_features]`
    in float32; `read` reads the matrix without it."""

    read: Callable[[], np.ndarray | Weight]
    down: np.ndarray
    up: np.ndarray


@dataclass(eq=False)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        name: A name for messages and reports.
        path: The folder or file.
        config: The keys of a Hugging Face `config.json`.
        tensors: Tensors by Hugging Face name (`model.layers.0.self_attn.q_proj.weight`), read on
            access. Matrices may be packed (`Weight`); everything else is a numpy array (bfloat16 by
            `ml_dtypes`).
        tokenizer: The checkpoint's tokenizer, if it has one.
        generation_config: The keys of `generation_config.json`.
        pooling: How embeddings are computed, if the repository says.
        updates: The updates that are merged into tensors, by the name of their module: of packed
            matrices, a model can compute them beside these.
        adapters: Adapters that a model computes beside its matrices: their folders, and their
            factors by the name of the matrix in the network (`Weight.name`).
    """

    name: str
    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, np.ndarray | Weight]
    tokenizer: Tokenizer | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    pooling: Pooling | None = None
    updates: Mapping[str, MatrixUpdate] = field(default_factory=dict)
    adapters: tuple[tuple[Path, Mapping[str, Factors]], ...] = ()
