"""Oracle test of parallelspec (arXiv:2410.05589): the trees that follow from a forward pass of
target and drafter over the whole text and mask tokens, written from the drafter's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative import eagle
from anydecode.certification.oracles.speculative.state_drafters import (
    Drafter,
    Oracle,
    Path,
    TargetStates,
    compare_trees,
    shares,
)
from anydecode.certification.tiny_blocks import parallelspec_checkpoint
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

#: The drafters of the test by name.
DRAFTERS: dict[str, Drafter] = {
    "4 masks": parallelspec_checkpoint,
    "1 mask, two layers": partial(parallelspec_checkpoint, masks=1, layers=2),
}


def slot_logits(checkpoint: Checkpoint, target: Network, text: list[int]) -> list[np.ndarray]:
    """The logits of every position behind `text`, of all tokens."""
    rows, forward, cache = eagle.Drafting(checkpoint, target), TargetStates(target), eagle.Cache()
    state = None
    for position, token in enumerate(text):
        if state is not None:
            last, _ = rows.row(cache, token, state, position)
        state = forward.normed(forward.states(token)[-1])
    found, mask = [last], int(checkpoint.config["mask_token_id"])
    for position, learned in enumerate(rows.tensors["mask_states"], len(text)):
        found.append(rows.row(cache, mask, learned, position)[0])
    return found


def drafted_by(size: int, threshold: float) -> Oracle:
    """The best `size` paths of the product of the positions' candidates, of probability at least
    `threshold`."""

    def paths(
        checkpoint: Checkpoint, target: Network, text: list[int], temperature: float
    ) -> list[Path]:
        ranked = [
            shares(row, temperature, len(text) + slot)[:size]
            for slot, row in enumerate(slot_logits(checkpoint, target, text)[:size])
        ]
        found: list[tuple[float, Path]] = []

        def extend(weight: float, path: Path, room: int) -> None:
            """At least as probable as a path are those with no larger rank at any position, whose
            number is the product of its ranks; `room` is what `size` leaves of it."""
            slot = ranked[len(path)] if len(path) < len(ranked) else []
            for rank, (token, share) in enumerate(slot[:room], 1):
                if weight * share >= threshold:
                    found.append((weight * share, (*path, token)))
                    extend(*found[-1], room // rank)

        extend(1.0, (), size)
        return [path for _, path in sorted(found, key=lambda one: -one[0])[:size]]

    return paths


@oracle_test("parallelspec")
def parallelspec() -> Iterator[Check]:
    """The trees equal the oracle's."""
    for name, drafter in DRAFTERS.items():
        yield from compare_trees(name, "parallelspec", drafter, drafted_by(8, 0.1))
    key = "parallelspec:size=3,threshold=0"
    yield from compare_trees("4 masks", key, parallelspec_checkpoint, drafted_by(3, 0.0))
