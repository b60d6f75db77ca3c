"""Draft models of a target: a copy in another weight format or with fewer layers, a drafter that
reads its states, or another model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from anydecode.errors import CheckpointError, InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.formats import dequantize_rows
from anydecode.kernels.native import NativeExecutor
from anydecode.kernels.packing import FLOAT_FORMATS
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.drafters import Loader, drafter_model, find_loader
from anydecode.models.families import load_network
from anydecode.models.interface import Model
from anydecode.models.loading import load_checkpoint
from anydecode.models.mtp import has_mtp, load_mtp
from anydecode.models.network import Network
from anydecode.models.opening import (
    add_trained_parts,
    choose_executor,
    open_checkpoint,
    open_model,
)
from anydecode.models.shipped_drafters import shipped_drafter
from anydecode.models.tokenizer import Tokenizer
from anydecode.models.transformer import Transformer

DTYPES = ("float32", "bfloat16", "int8", "int4")


def open_draft(
    draft: Any,
    target: Model,
    *,
    dtype: str | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> tuple[Model, Tokenizer | None]:
    """Open a draft model.

    Args:
        draft: Anything `open_model` takes, the folder of a drafter that reads the target's states
            (EAGLE, DFlash, Medusa, Hydra), or a copy of the target: "self:" followed by a dtype
            ("self:int4"), layers=n (n of its layers, evenly spaced, including the first and the
            last), or both, separated by a comma. "self" alone is the target itself.
        target: The target model.
        dtype: The weight format of the draft; None means as stored, and int4 for a drafter in
            floating point that reads the states of a target with quantised weights.
        threads: The number of threads of the native kernels.
        backend: The backend of the draft, see `choose_executor`.

    Returns:
        The draft model, and its tokenizer; None for one that uses the target's.

    Raises:
        InvalidRequestError: What follows "self:" is neither layers=n nor a dtype, or n is out of
            range.
        CheckpointError: The files are corrupt, unsupported, or do not fit the target.
        UnsupportedCombinationError: The target has no checkpoint to copy, or no states to read.
    """
    if not isinstance(draft, str | os.PathLike):
        return open_model(draft, dtype=dtype, threads=threads, backend=backend)
    if not isinstance(draft, str) or draft.partition(":")[0] != "self":
        checkpoint = load_checkpoint(draft if isinstance(draft, str) else Path(draft))
        load = load_mtp if _is_own_module(checkpoint, target) else find_loader(checkpoint)
        if load is not None:
            return _open_head(checkpoint, load, target, dtype, threads, backend), None
        return open_checkpoint(checkpoint, dtype=dtype, threads=threads, backend=backend)
    draft_dtype, layers = dtype, 0
    for part in filter(None, draft.partition(":")[2].split(",")):
        name, _, value = part.strip().partition("=")
        if name == "layers" and value.isdecimal():
            layers = int(value)
        elif name in DTYPES and not value:
            draft_dtype = name
        else:
            raise InvalidRequestError(
                f"draft={draft!r}: allowed after 'self:' are layers=n and one of"
                f" {', '.join(DTYPES)}"
            )
    if draft_dtype == dtype and not layers:
        return target, None
    path = getattr(target, "path", None)
    if path is None:
        raise UnsupportedCombinationError(
            f"draft={draft!r} copies a model from its checkpoint; this one has none"
        )
    if not layers:
        model: Any = open_model(path, dtype=draft_dtype, threads=threads, backend=backend)[0]
        model.name = f"{target.name} ({draft_dtype})"
        return model, None
    network = select_layers(load_network(load_checkpoint(path), draft_dtype), layers)
    kept = f"{layers} layers" if draft_dtype is None else f"{layers} layers, {draft_dtype}"
    name = f"{target.name} ({kept})"
    return Transformer(network, name=name, executor=choose_executor(backend, threads)), None


def open_own_draft(
    target: Model,
    *,
    dtype: str | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Model | None:
    """The module of the target's own checkpoint that predicts further tokens; None if there is
    none. Arguments and errors as for `open_draft`."""
    path = getattr(target, "path", None)
    if path is None:
        return None
    checkpoint = load_checkpoint(path)
    if not has_mtp(checkpoint):
        return None
    return _open_head(checkpoint, load_mtp, target, dtype, threads, backend)


def open_shipped_draft(
    target: Model, *, threads: int | None = None, backend: str | None = None
) -> Model | None:
    """The drafter for `target` in this package; None if there is none, or if `target` does not run
    with the native kernels, which alone draft within multi-step passes."""
    if not isinstance(target, Transformer) or not isinstance(target.executor, NativeExecutor):
        return None
    folder = shipped_drafter(target.network) if target.spec.causal else None
    if folder is None:
        return None
    # In a wider format, a step would take up to half as long as one of the target.
    model: Any = open_draft(folder, target, dtype="int4", threads=threads, backend=backend)[0]
    model.name = f"{folder.name} (shipped)"
    return model


def _is_own_module(checkpoint: Checkpoint, target: Model) -> bool:
    """Whether the draft is the target's own checkpoint, with a module that predicts tokens."""
    return checkpoint.path == getattr(target, "path", None) and has_mtp(checkpoint)


def _is_gguf(checkpoint: Checkpoint) -> bool:
    return checkpoint.path.suffix == ".gguf"


def _open_head(
    checkpoint: Checkpoint,
    load: Loader,
    target: Model,
    dtype: str | None,
    threads: int | None,
    backend: str | None,
) -> Transformer:
    """The drafter of `checkpoint`, which reads the states of `target` and may use its embedding and
    head."""
    if not isinstance(target, Transformer):
        raise UnsupportedCombinationError(
            f"{checkpoint.name} reads the states of its target, which {target.name} does not return"
        )
    options: dict[str, Any] = {}
    is_quantised = any(w.format not in FLOAT_FORMATS for w in target.network.matrices())
    if dtype is None and is_quantised and load is not load_mtp and not _is_gguf(checkpoint):
        dtype = "int4"  # in floating point, a step would take half as long as one of the target
    if load is not load_mtp:
        options["read_rows"] = getattr(target.executor, "read_rows", dequantize_rows)
    try:
        network = load(checkpoint, target.network, dtype, **options)
    except CheckpointError as error:  # most often, it is a drafter of another model
        spec = target.spec
        raise CheckpointError(
            f"{error} (opened as a drafter for {target.name}: hidden size {spec.hidden_size},"
            f" {spec.vocab_size} tokens)"
        ) from error
    packer = getattr(target.executor, "packer", None)
    executor = choose_executor(backend, threads, packer=packer)
    name = f"{checkpoint.name} (MTP)" if load is load_mtp else checkpoint.name
    model = drafter_model(network, name=name, executor=executor)
    for one in (model, *model.further):
        one.path, one.dtype = checkpoint.path, dtype
    add_trained_parts(model, checkpoint.path)
    return model


def select_layers(network: Network, layers: int) -> Network:
    """`layers` evenly spaced layers of `network`, with the same weights."""
    num_layers = network.spec.num_layers
    if not 2 <= layers <= num_layers:
        raise InvalidRequestError(
            f"layers={layers}: a draft can keep 2 to {num_layers} of the layers"
        )
    selected = [round(index * (num_layers - 1) / (layers - 1)) for index in range(layers)]
    spec, weights = network.spec, network.weights
    return Network(
        replace(spec, layers=tuple(spec.layers[layer] for layer in selected)),
        replace(weights, layers=[weights.layers[layer] for layer in selected]),
    )
