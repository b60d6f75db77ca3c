"""Reads the tasks of jina-embeddings-v3 from the files that llama.cpp's converter writes beside the
model's: `lora-TASK-NAME.gguf` for the model NAME.gguf, each with the low-rank updates of a task."""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.encoder_tasks import UPDATES
from anydecode.models.loading.gguf_file import GGUFFile, TensorInfo
from anydecode.models.loading.lazy import Reader

#: The architecture of models with tasks.
ARCHITECTURE = "jina-bert-v3"
_A, _B = "lora_a", "lora_b"
_KEY = "adapter.lora"


def read_task_files(
    path: Path, config: dict[str, Any], target: Callable[[TensorInfo], str]
) -> dict[str, Reader]:
    """The updates of the tasks of a model, by name; none without files of tasks.

    Args:
        path: The model's file.
        config: Its config, to which the keys of `models.task_files` are added.
        target: The name in Hugging Face's layout of a tensor of the model.

    Raises:
        CheckpointError: A file is damaged or of another model, or the tasks differ in their
            matrices.
    """
    paths = sorted(path.parent.glob(f"lora-*-{glob.escape(path.name)}"))
    if not paths:
        return {}
    files = {_task(file): file for file in map(GGUFFile, paths)}
    if len(files) < len(paths):
        raise CheckpointError(f"{path}: two of its files of updates are of the same task")
    first, *others = files.values()
    ranks = [info.shape[0] for name, info in first.tensors.items() if name.startswith("blk.")]
    alpha = first.metadata.get(f"{_KEY}.alpha", 1.0)
    for file in others:
        if file.metadata.get(f"{_KEY}.alpha", 1.0) != alpha:
            raise CheckpointError(f"{file.path}: has another alpha than {first.path}")
        if file.tensors.keys() != first.tensors.keys():
            raise CheckpointError(f"{file.path}: has updates of other tensors than {first.path}")
    prompts = {task: file.metadata.get(f"{_KEY}.prompt_prefix", "") for task, file in files.items()}
    config |= {
        "lora_adaptations": [*files],
        "task_instructions": prompts,
        "lora_alpha": alpha,
        "lora_rank": ranks[0] if ranks else 1,
    }
    found: dict[str, Reader] = {}
    for name, info in first.tensors.items():
        tensor, _, part = name.rpartition(".")
        if part not in (_A, _B) or any(file.tensors[name].shape != info.shape for file in others):
            raise CheckpointError(f"{first.path}: {name!r} is no update that all tasks have")
        usual = target(replace(info, name=tensor))
        if tensor == "token_types.weight":  # stored the other way round
            part = _B if part == _A else _A
        module = usual.removeprefix("model.").removesuffix(".weight")
        is_turned = (tensor, part) == ("token_embd.weight", _B)
        found[f"{UPDATES}{module}.{part[:-1]}{part[-1].upper()}"] = partial(
            _stack, [*files.values()], name, is_turned
        )
    return found


def _task(file: GGUFFile) -> str:
    """The task of a file of updates."""
    metadata = file.metadata
    task = metadata.get(f"{_KEY}.task_name")
    if (
        metadata.get("general.architecture") != ARCHITECTURE
        or metadata.get("adapter.type") != "lora"
        or not isinstance(task, str)
    ):
        raise CheckpointError(f"{file.path}: holds no updates of a task of jina-embeddings-v3")
    return task


def _stack(files: list[GGUFFile], name: str, is_turned: bool) -> np.ndarray:
    """A tensor of all files as one."""
    parts = []
    for file in files:
        part = file.read(name)
        if not isinstance(part, np.ndarray):
            raise CheckpointError(f"{file.path}: {name!r} is quantised; updates must not be")
        parts.append(np.asarray(part.T if is_turned else part, np.float32))
    return np.stack(parts)
