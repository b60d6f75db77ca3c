"""Reads the tasks of an encoder from its checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.encoder_tasks import UPDATES, EncoderTask
from anydecode.models.families.values import int_value, list_value, mapping_value
from anydecode.models.limits import MAX_COUNT, number, refusal
from anydecode.models.lora import Factors, fit_factors
from anydecode.models.network import Network


def read_tasks(checkpoint: Checkpoint, network: Network) -> dict[str, EncoderTask]:
    """The tasks of a checkpoint by name; none where its matrices have no updates.

    Raises:
        CheckpointError: An update does not fit the model, or a key of the config is invalid.
    """
    names = [name for name in checkpoint.tensors if name.startswith(UPDATES)]
    modules = sorted({name.removeprefix(UPDATES).rpartition(".")[0] for name in names})
    if not modules:
        return {}
    config = checkpoint.config
    tasks = list_value(config, "lora_adaptations", str) or []
    prompts = mapping_value(config, "task_instructions")
    rank = int_value(config, "lora_rank", 4, high=MAX_COUNT)
    scale = number("lora_alpha", config.get("lora_alpha", 1.0)) / rank
    factors = {module: _factors(checkpoint, module, len(tasks), rank) for module in modules}
    vocab, hidden = network.spec.vocab_size, network.spec.hidden_size
    if not network.spec.num_segments:
        raise refusal("type_vocab_size", 0, "1 or more where tasks have updates")
    tables = []
    for name, size in (("embed_tokens", vocab), ("embed_segments", network.spec.num_segments)):
        absent = np.zeros((len(tasks), size, rank)), np.zeros((len(tasks), rank, hidden))
        rows, columns = factors.pop(name, absent)
        if rows.shape[1:] != (size, rank) or columns.shape[1:] != (rank, hidden):
            raise CheckpointError(
                f"{checkpoint.name}: the updates of {name} are {rows.shape[1:]} and"
                f" {columns.shape[1:]}; allowed are {(size, rank)} and {(rank, hidden)}"
            )
        tables.append((rows.astype(np.float32), columns.astype(np.float32) * np.float32(scale)))
    found = {}
    for index, task in enumerate(tasks):
        prompt = prompts.get(task, "")
        if not isinstance(prompt, str):
            raise refusal(f"task_instructions of {task}", prompt, "a text")
        parts = {
            f"model.{module}": Factors(down[index], up[index], scale)
            for module, (down, up) in factors.items()
        }
        adapter = fit_factors(checkpoint.path, parts, network)
        (rows, columns), (types, type_columns) = tables
        update = (types[index, :, :, None] * type_columns[index]).sum(1)
        found[task] = EncoderTask(prompt, adapter, (rows[index], columns[index]), update)
    return found


def _factors(
    checkpoint: Checkpoint, module: str, num_tasks: int, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """The stacks A and B of a module, float32, with one matrix per task."""
    stacks: list[Any] = []
    for part, axis in (("lora_A", -2), ("lora_B", -1)):
        name = f"{UPDATES}{module}.{part}"
        stack = checkpoint.tensors.get(name)
        is_embedding = module.startswith("embed_")
        axis = -3 - axis if is_embedding else axis
        if not isinstance(stack, np.ndarray) or stack.ndim != 3:
            raise CheckpointError(f"{checkpoint.name}: {name} is no stack of matrices")
        if len(stack) != num_tasks or stack.shape[axis] != rank:
            raise CheckpointError(
                f"{checkpoint.name}: {name} has shape {stack.shape}; allowed are {num_tasks}"
                f" matrices of rank {rank}"
            )
        values = stack.astype(np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{checkpoint.name}: {name} has numbers that are not finite")
        stacks.append(values)
    return stacks[0], stacks[1]
