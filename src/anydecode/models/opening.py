"""Whatever a user calls a model, made into one."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.reference import ReferenceBackend
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.interface import Model
from anydecode.models.limits import refusal
from anydecode.models.network import Network
from anydecode.models.tokenizer import Tokenizer
from anydecode.models.transformer import Executor

BACKENDS = ("native", "torch", "triton")


class WeightFormat(ABC):
    """A number format with a way of its own to get there. `dtype` is what it ends in."""

    @property
    @abstractmethod
    def dtype(self) -> str | None:
        """The format as every model knows it."""

    @abstractmethod
    def open(self, model: Any, **options: Any) -> tuple[Model, Tokenizer | None]:
        """The model of a name, a folder or a file in this format; `options` as for `open_model`."""


def choose_executor(
    backend: str | None = None, threads: int | None = None, device: str | None = None
) -> Callable[[Network], Executor] | None:
    """What runs a network: on the CPU the compiled kernels ("native") where they can be had, else
    torch (None); on `device` "cuda" the Triton kernels ("triton") where they can be had, else
    torch. `backend`, or the environment variable ANYDECODE_BACKEND, settles it."""
    from anydecode.kernels.native import NativeExecutor, thread_count

    thread_count(threads)  # whichever backend it is, no other number is accepted
    wanted = backend or os.environ.get("ANYDECODE_BACKEND") or None
    if wanted not in (None, *BACKENDS):
        raise InvalidRequestError(
            f"no backend is called {wanted!r}; there are {', '.join(BACKENDS)}"
        )
    kind = (device or "cpu").partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InvalidRequestError(f"device {device!r} is unknown; choose cpu or cuda")
    on_gpu = kind == "cuda"
    if on_gpu and wanted == "native":
        raise UnsupportedCombinationError("the native kernels run on the CPU, not on cuda")
    if wanted == "triton" or (on_gpu and wanted is None):
        return _triton_executor(wanted)
    if wanted == "torch":
        return None
    from anydecode.kernels.library import load_library

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


def _triton_executor(wanted: str | None) -> Callable[[Network], Executor] | None:
    from anydecode.kernels.cuda.available import why_not

    problem = why_not()
    if problem is not None:
        if wanted:
            raise UnsupportedCombinationError(f"the Triton kernels cannot run here: {problem}")
        return None

    def execute(network: Network) -> Executor:
        from anydecode.kernels.cuda.executor import TritonExecutor

        executor = TritonExecutor(
            network.weights.embedding,
            network.spec.vocab_size,
            network.layer,
            network.head,
            [layer.attention for layer in network.spec.layers],
            matrices=network.matrices(),
            embedding_scale=network.spec.embedding_scale,
            adapters=network.adapters,
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


def _reference(device: str | None) -> ReferenceBackend:
    """The torch reference on a device. Raises UnsupportedCombinationError where there is none."""
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedCombinationError("torch finds no CUDA device")
    return ReferenceBackend(device or "cpu")


def open_checkpoint(
    checkpoint: Checkpoint,
    *,
    dtype: str | None = None,
    threads: int | None = None,
    backend: str | None = None,
    device: str | None = None,
) -> tuple[Model, Tokenizer | None]:
    """The model of a checkpoint that is loaded already, and its tokenizer."""
    from anydecode.models.families import build_model

    executor = choose_executor(backend, threads, device)
    reference = None if executor else _reference(device)
    built = build_model(checkpoint, dtype, reference, executor=executor)
    mask, size = getattr(checkpoint.tokenizer, "mask_id", None), built.spec.vocab_size
    if mask is not None and mask >= size and not built.spec.causal:
        raise refusal("mask_token_id", mask, f"a token of the {size} that have embeddings")
    built.path, built.dtype = checkpoint.path, dtype
    return built, checkpoint.tokenizer


def open_model(
    model: Any,
    *,
    dtype: str | WeightFormat | None = None,
    threads: int | None = None,
    backend: str | None = None,
    device: str | None = None,
) -> tuple[Model, Tokenizer | None]:
    """The model, and the tokenizer its checkpoint brings. `model` is a name, a repo id, a folder, a
    `.gguf` path, an object with the `Model` protocol or a `transformers` causal model. `device` is
    "cpu" (None means it) or "cuda"."""
    if isinstance(dtype, WeightFormat):
        return dtype.open(model, threads=threads, backend=backend, device=device)
    if isinstance(model, str | os.PathLike):
        from anydecode.models.loading import load_checkpoint

        checkpoint = load_checkpoint(model if isinstance(model, str) else Path(model))
        return open_checkpoint(
            checkpoint, dtype=dtype, threads=threads, backend=backend, device=device
        )
    if hasattr(model, "run") and hasattr(model, "spec"):
        return model, getattr(model, "tokenizer", None)
    if hasattr(model, "forward") and hasattr(model, "config"):
        from anydecode.models.hf import HuggingFaceModel

        return HuggingFaceModel(model), None
    raise InvalidRequestError(
        f"a {type(model).__name__} is no model: give a name, a folder, a .gguf file, or a"
        " transformers causal model"
    )
