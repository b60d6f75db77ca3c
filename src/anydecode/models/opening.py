"""Whatever a user calls a model, made into one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.interface import Model
from anydecode.models.network import Network
from anydecode.models.tokenizer import Tokenizer
from anydecode.models.transformer import Executor

BACKENDS = ("native", "torch")


def choose_executor(
    backend: str | None = None, threads: int | None = None
) -> Callable[[Network], Executor] | None:
    """What runs a network: the compiled kernels ("native") where they can be had, else torch
    (None). `backend`, or the environment variable ANYDECODE_BACKEND, settles it."""
    wanted = backend or os.environ.get("ANYDECODE_BACKEND") or None
    if wanted not in (None, *BACKENDS):
        raise InvalidRequestError(
            f"no backend is called {wanted!r}; there are {', '.join(BACKENDS)}"
        )
    if wanted == "torch":
        return None
    from anydecode.kernels.library import load_library
    from anydecode.kernels.native import NativeExecutor

    if load_library() is None:
        if wanted == "native":
            raise UnsupportedCombinationError("the native kernels are not available here")
        return None

    def execute(network: Network) -> Executor:
        executor = NativeExecutor(
            network.weights.embedding,
            network.spec.vocab_size,
            network.spec.num_layers,
            network.layer,
            network.head,
            embedding_scale=network.spec.embedding_scale,
            adapters=network.adapters,
            threads=threads,
        )
        network.forget_matrices()
        return executor

    return execute


def open_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """A tokenizer of ours, or of `transformers`, as ours. Raises `InvalidRequestError`."""
    if tokenizer is None or hasattr(tokenizer, "token_bytes"):
        ours: Tokenizer | None = tokenizer
        return ours
    if hasattr(tokenizer, "backend_tokenizer"):
        from anydecode.models.tokenizers import HFTokenizer

        return HFTokenizer.from_transformers(tokenizer)
    raise InvalidRequestError(
        f"a {type(tokenizer).__name__} is no tokenizer: give a fast tokenizer of transformers, or"
        " an object with anydecode's Tokenizer protocol"
    )


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

        checkpoint = load_checkpoint(model if isinstance(model, str) else Path(model))
        built = build_model(checkpoint, dtype, executor=choose_executor(backend, threads))
        built.path, built.dtype = checkpoint.path, dtype
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
