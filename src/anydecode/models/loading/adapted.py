"""Loads an adapter's folder as a model: the base model with the adapter, which is merged into its
weights or, where these are packed, computed beside them."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES, dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint, MatrixUpdate
from anydecode.models.families.table import FAMILIES
from anydecode.models.files import read_json
from anydecode.models.loading.lazy import LazyTensors, Reader
from anydecode.models.loading.names import base_model_name, resolve
from anydecode.models.lora import Factors, read_factors


def load_adapted(path: Path) -> Checkpoint:
    """Load the base model that `adapter_config.json` names (by name or path) with the adapter. Its
    tensors are bfloat16 with the adapter merged; `Checkpoint.updates` has the adapter by itself.
    An adapter of matrices that are no tensors of the checkpoint, such as the parts of a fused one,
    is in `Checkpoint.adapters`. With a `block.json`, the result is a block-diffusion model.

    Raises:
        CheckpointError: Files are corrupt, or the adapter does not fit the model.
        ModelNotFoundError: The base model is not on this machine.
    """
    from anydecode.models.loading import load_checkpoint

    name = _base_name(path)
    _, factors = read_factors(path)
    base = load_checkpoint(name)
    if all(f"{module}.weight" in base.tensors for module in factors):
        adapted = _with_merged(path, base, factors)
    else:
        adapted = replace(
            base, name=path.name, path=path, adapters=(*base.adapters, (path, factors))
        )
    return _as_block_diffusion(path, adapted) if (path / "block.json").is_file() else adapted


def _with_merged(path: Path, base: Checkpoint, factors: dict[str, Factors]) -> Checkpoint:
    """A base model with the factors of the adapter `path` merged."""
    readers: dict[str, Reader] = {
        key: partial(base.tensors.__getitem__, key) for key in base.tensors
    }
    updates: dict[str, MatrixUpdate] = {}
    for module, module_factors in factors.items():
        key = f"{module}.weight"
        up = np.float32(module_factors.scale) * module_factors.up
        updates[module] = MatrixUpdate(readers[key], module_factors.down, up)
        readers[key] = partial(_merged, path, key, updates[module])
    tensors = LazyTensors(path, readers)
    # A base model that is an adapter itself is merged where it has the matrices of this one.
    others = {name: one for name, one in base.updates.items() if name not in updates}
    return replace(base, name=path.name, path=path, tensors=tensors, updates={**others, **updates})


def _base_name(path: Path) -> str:
    """The name of an adapter's base model, which may be an adapter, but not one based on this.

    Raises:
        CheckpointError: There is no name, or the base models form a circle.
        ModelNotFoundError: The base model is not on this machine.
    """
    first, folder, seen = base_model_name(path), path, set()
    if not first:
        raise CheckpointError(
            f"{path}: adapter_config.json does not name a base model (base_model_name_or_path)"
        )
    while name := base_model_name(folder):
        if folder.resolve() in seen:
            raise CheckpointError(f"{path}: the base models of its adapters form a circle")
        seen.add(folder.resolve())
        folder = resolve(name)
    return first


def _as_block_diffusion(path: Path, adapted: Checkpoint) -> Checkpoint:
    """Turn a causal checkpoint into a block-diffusion model, as the dLLM library does, with the
    block size and the mask token of `block.json`."""
    settings = read_json(path / "block.json")
    model_type, mask = f"a2d-{adapted.config.get('model_type')}", settings.get("mask_token_id")
    is_complete = all(
        isinstance(value, int) and value > 0 for value in (settings.get("block_size"), mask)
    )
    if not is_complete or model_type not in FAMILIES:
        raise CheckpointError(
            f"{path}: block.json does not describe a supported block-diffusion model"
        )
    tokenizer = copy(adapted.tokenizer)
    if tokenizer is not None:
        tokenizer.mask_id = mask
    family = {"model_type": model_type, "architectures": list(FAMILIES[model_type].architectures)}
    config = {**adapted.config, **settings, **family}
    return replace(adapted, config=config, tokenizer=tokenizer)


def _merged(path: Path, key: str, update: MatrixUpdate) -> np.ndarray:
    stored = update.read()
    weight = dequantize(stored) if isinstance(stored, Weight) else stored.astype(np.float32)
    if weight.shape != (update.up.shape[0], update.down.shape[1]):
        raise CheckpointError(f"{path}: the adapter does not fit {key} of shape {weight.shape}")
    return (weight + update.up @ update.down).astype(DTYPES["BF16"])
