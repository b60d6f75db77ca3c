"""Whatever a user calls a model, made into one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anydecode.errors import InvalidRequestError
from anydecode.models.interface import Model
from anydecode.models.tokenizer import Tokenizer


def open_model(
    model: Any,
    *,
    dtype: str | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> tuple[Model, Tokenizer | None]:
    """The model, and the tokenizer its checkpoint brings. `model` is a name, a repo id, a folder, a
    `.gguf` path, an object with the `Model` protocol or a `transformers` causal model."""
    if isinstance(model, str | os.PathLike):
        from anydecode.models.families import build_model
        from anydecode.models.loading import load_checkpoint

        name = model if isinstance(model, str) else Path(model)
        checkpoint = load_checkpoint(name)
        built = build_model(checkpoint, dtype=dtype, backend=backend, threads=threads)
        return built, checkpoint.tokenizer
    if hasattr(model, "run") and hasattr(model, "spec"):
        return model, getattr(model, "tokenizer", None)
    if hasattr(model, "forward") and hasattr(model, "config"):
        from anydecode.models.hf import HuggingFaceModel

        return HuggingFaceModel(model), None
    raise InvalidRequestError(
        f"a {type(model).__name__} is no model: give a name, a folder, a .gguf file, or a"
        " transformers causal model"
    )
