"""Oracle test of medusa (arXiv:2401.10774): the trees that follow from the heads' tensors and the
target's state before the last token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.state_drafters import (
    Drafter,
    Oracle,
    Path,
    TargetStates,
    best_paths,
    compare_trees,
)
from anydecode.certification.tiny_heads import medusa_checkpoint
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

#: The drafters of the test by name.
DRAFTERS: dict[str, Drafter] = {
    "3 heads": medusa_checkpoint,
    "5 heads of 2 blocks": partial(medusa_checkpoint, heads=5, layers=2),
}
SHARED: Drafter = partial(medusa_checkpoint, own_heads=False)


def head_logits(checkpoint: Checkpoint, target: Network, text: list[int]) -> list[np.ndarray]:
    """The logits of every head for the token behind `text` and those that follow."""
    forward = TargetStates(target)
    for token in text[:-1]:
        last = forward.states(token)[-1]
    state = forward.normed(last)
    tensors = {name: np.asarray(x, np.float64) for name, x in checkpoint.tensors.items()}
    num_heads = 1 + max(int(name.split(".")[0]) for name in tensors)
    num_blocks = sum(name.startswith("0.") and name.endswith("bias") for name in tensors)
    rows = []
    for head in range(num_heads):
        x = state
        for block in range(num_blocks):
            name = f"{head}.{block}.linear"
            y = tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"]
            x = x + y / (1 + np.exp(-y))
        output = tensors.get(f"{head}.{num_blocks}.weight")
        rows.append((target.weights.head.data if output is None else output) @ x)
    return rows


def drafted_by(size: int, depth: int) -> Oracle:
    """The best `size` paths of up to `depth` heads."""

    def paths(
        checkpoint: Checkpoint, target: Network, text: list[int], temperature: float
    ) -> list[Path]:
        rows = head_logits(checkpoint, target, text)[:depth]
        return best_paths(lambda path: rows[len(path)], len(text), temperature, size, len(rows))

    return paths


@oracle_test("medusa")
def medusa() -> Iterator[Check]:
    """The trees equal the oracle's, for heads with their own last matrix and with the target's."""
    for name, drafter in DRAFTERS.items():
        yield from compare_trees(name, "medusa", drafter, drafted_by(8, 4))
    yield from compare_trees("shared", "medusa", SHARED, drafted_by(8, 4), is_accepted=False)
    key = "medusa:size=5,depth=2"
    yield from compare_trees("3 heads", key, medusa_checkpoint, drafted_by(5, 2))
