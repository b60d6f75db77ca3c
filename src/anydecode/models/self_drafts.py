"""Draft models made from the target: a copy in another weight format, or with fewer layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.families import build_model
from anydecode.models.interface import Model
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor, open_model
from anydecode.models.tokenizer import Tokenizer
from anydecode.models.transformer import Executor, Transformer

DTYPES = ("float32", "bfloat16", "int8", "int4")


def open_draft(
    draft: Any,
    target: Model,
    *,
    dtype: str | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> tuple[Model, Tokenizer | None]:
    """A draft model: anything `open_model` takes, or a copy of `target` that says "self:" and then
    a dtype, or layers=n (n of its layers, spread evenly, first and last among them), or both with
    a comma between them. "self" alone is the target itself."""
    if not isinstance(draft, str) or draft.partition(":")[0] != "self":
        return open_model(draft, dtype=dtype, threads=threads, backend=backend)
    copied, layers = dtype, 0
    for part in filter(None, draft.partition(":")[2].split(",")):
        name, _, value = part.strip().partition("=")
        if name == "layers" and value.isdecimal():
            layers = int(value)
        elif name in DTYPES and not value:
            copied = name
        else:
            raise InvalidRequestError(
                f"draft={draft!r}: after 'self:' stand layers=n or one of {', '.join(DTYPES)}"
            )
    if copied == dtype and not layers:
        return target, None
    path = getattr(target, "path", None)
    if path is None:
        raise UnsupportedCombinationError(
            f"draft={draft!r} copies a model from its checkpoint; this one has none"
        )
    if not layers:
        return open_model(path, dtype=copied, threads=threads, backend=backend)[0], None
    whole = build_model(load_checkpoint(path), copied)
    return thinned(whole, layers, choose_executor(backend, threads)), None


def thinned(
    model: Transformer, layers: int, executor: Callable[[Network], Executor] | None = None
) -> Transformer:
    """`model` with `layers` of its layers, sharing their weights."""
    depth = model.spec.num_layers
    if not 2 <= layers <= depth:
        raise InvalidRequestError(f"layers={layers}: a draft can keep 2 to {depth} of the layers")
    kept = [round(position * (depth - 1) / (layers - 1)) for position in range(layers)]
    spec = replace(model.spec, layers=tuple(model.spec.layers[layer] for layer in kept))
    weights = model.network.weights
    few = replace(weights, layers=[weights.layers[layer] for layer in kept])
    return Transformer(spec, few, name=f"{model.name} ({layers} layers)", executor=executor)
