"""The tasks of an encoder: low-rank updates of its matrices and of its embeddings.

jina-embeddings-v3 (Sturua et al., 2024, arXiv:2409.10173) has one update per task and matrix, and
of the tables of tokens and of token types. Without a task none applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import Adapter

#: How the names of the tensors of updates begin: `task_updates.<module>.lora_A` and `.lora_B`.
UPDATES = "task_updates."


@dataclass(eq=False)
class EncoderTask:
    """The updates of one task.

    Attributes:
        prompt: The text that is put before a text.
        adapter: The updates of the matrices.
        tokens: The update of the table of tokens, `tokens[0] @ tokens[1]`: float32
            `[vocab_size, rank]` and `[rank, hidden_size]`.
        types: The update of the table of token types, float32 `[num_segments, hidden_size]`.
    """

    prompt: str
    adapter: Adapter
    tokens: tuple[np.ndarray, np.ndarray]
    types: np.ndarray

    def embeddings(self, tokens: np.ndarray, types: np.ndarray) -> np.ndarray:
        """What is added to the embeddings of tokens of these types, float32 `[n, hidden_size]`. The
        order of additions does not depend on n."""
        added: np.ndarray = self.types[types]
        for rows, column in zip(self.tokens[0][tokens].T, self.tokens[1], strict=True):
            added = added + rows[:, None] * column
        return added


def tasks_of(model: Any) -> Mapping[str, EncoderTask]:
    """The tasks of a model, by name."""
    return getattr(model, "tasks", {})


def task_named(tasks: Mapping[str, EncoderTask], name: str | None) -> EncoderTask | None:
    """The task called `name`; None for None.

    Raises:
        InvalidRequestError: There is no task of this name.
    """
    if name is None:
        return None
    if name not in tasks:
        known = ", ".join(sorted(tasks)) or "none"
        raise InvalidRequestError(f"task is {name!r}; this model's tasks are: {known}")
    return tasks[name]
