"""An adapter's folder opened as a model: the model it is for, the adapter in its weights."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families.config import FAMILIES
from anydecode.models.loading.lazy import LazyTensors, Reader
from anydecode.models.lora import Factors, read_factors
from anydecode.models.tokenizers import read_json


def load_adapted(path: Path) -> Checkpoint:
    """The checkpoint that `adapter_config.json` names (a name or a path), each matrix with what the
    adapter adds to it, in bfloat16. Where there is a `block.json`, it is a block-diffusion model.

    Raises `CheckpointError` where files are broken or do not fit, and `ModelNotFoundError` where
    the model is not on this machine.
    """
    from anydecode.models.loading import load_checkpoint

    config, factors = read_factors(path)
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name or Path(name).expanduser().resolve() == path.resolve():
        raise CheckpointError(f"{path}: its config does not say which model it was trained for")
    base = load_checkpoint(name)
    readers: dict[str, Reader] = {
        key: partial(base.tensors.__getitem__, key) for key in base.tensors
    }
    for module, added in factors.items():
        key = f"{module}.weight"
        if key not in readers:
            raise CheckpointError(f"{path}: {name} has no {module} that an adapter can change")
        readers[key] = partial(_merged, path, key, readers[key], added)
    tensors = LazyTensors(path, readers)
    adapted = replace(base, name=path.name, path=path, tensors=tensors)
    return _blockwise(path, adapted) if (path / "block.json").is_file() else adapted


def _blockwise(path: Path, adapted: Checkpoint) -> Checkpoint:
    """The same as a block-diffusion model, of the kind that the dLLM library makes of causal ones,
    with the size of its blocks and its mask token as `block.json` says them."""
    told = read_json(path / "block.json")
    kind, mask = f"a2d-{adapted.config.get('model_type')}", told.get("mask_token_id")
    whole = all(isinstance(one, int) and one > 0 for one in (told.get("block_size"), mask))
    if not whole or kind not in FAMILIES:
        raise CheckpointError(f"{path}: block.json describes no block-diffusion model")
    tokenizer = copy(adapted.tokenizer)
    if tokenizer is not None:
        tokenizer.mask_id = mask
    named = {"model_type": kind, "architectures": list(FAMILIES[kind].architectures)}
    config = {**adapted.config, **told, **named}
    return replace(adapted, config=config, tokenizer=tokenizer)


def _merged(path: Path, key: str, read: Reader, added: Factors) -> torch.Tensor:
    stored = read()
    weight = dequantize(stored) if isinstance(stored, Weight) else stored.float()
    if weight.shape != (added.up.shape[0], added.down.shape[1]):
        raise CheckpointError(f"{path}: the adapter does not fit {key}, {tuple(weight.shape)}")
    return (weight + added.scale * (added.up @ added.down)).to(torch.bfloat16)
