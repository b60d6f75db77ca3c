"""Oracle test of blockwise (arXiv:1811.03115): the chains that follow from the heads' tensors and
the target's state before the last token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from ml_dtypes import bfloat16

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.state_drafters import (
    Drafter,
    Oracle,
    Path,
    TargetStates,
    compare_trees,
    shares,
)
from anydecode.certification.tiny_heads import blockwise_checkpoint
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

#: The drafters of the test by name.
DRAFTERS: dict[str, Drafter] = {
    "3 heads": blockwise_checkpoint,
    "6 heads for a part of the tokens": partial(blockwise_checkpoint, heads=6, modulus=9),
}


def head_logits(checkpoint: Checkpoint, target: Network, text: list[int]) -> list[np.ndarray]:
    """The logits of every head, of all tokens, for the tokens behind `text`."""
    forward = TargetStates(target)
    for token in text[:-1]:
        last = forward.states(token)[-1]
    state = forward.normed(last)
    tensors = {name: np.asarray(x, np.float64) for name, x in checkpoint.tensors.items()}
    inner = tensors["blockwise.hidden.weight"] @ state + tensors["blockwise.hidden.bias"]
    added = tensors["blockwise.output.weight"] @ np.maximum(inner, 0)
    sums = state + (added + tensors["blockwise.output.bias"]).reshape(-1, len(state))
    head = target.weights.head.data
    if "token_map" in tensors:  # rows of the target's head that are read in bfloat16
        head = head.astype(bfloat16)
    rows = sums @ head.astype(np.float64).T
    if "token_map" in tensors:
        absent = np.setdiff1d(np.arange(rows.shape[1]), tensors["token_map"].astype(int))
        rows[:, absent] = -np.inf
    return list(rows)


def drafted_by(size: int) -> Oracle:
    """The prefixes of the chain of the best token of each of up to `size` heads."""

    def paths(
        checkpoint: Checkpoint, target: Network, text: list[int], temperature: float
    ) -> list[Path]:
        chain = [
            shares(row, temperature, len(text) + number)[0][0]
            for number, row in enumerate(head_logits(checkpoint, target, text)[:size])
        ]
        return [tuple(chain[: length + 1]) for length in range(len(chain))]

    return paths


@oracle_test("blockwise")
def blockwise() -> Iterator[Check]:
    """The chains equal the oracle's, for heads of all tokens and of a part of them."""
    for name, drafter in DRAFTERS.items():
        yield from compare_trees(name, "blockwise", drafter, drafted_by(4))
    yield from compare_trees("3 heads", "blockwise:size=2", blockwise_checkpoint, drafted_by(2))
