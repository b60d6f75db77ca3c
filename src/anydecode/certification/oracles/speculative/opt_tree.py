"""Oracle test of opt-tree (arXiv:2406.17276): the most probable nodes of the whole tree, found with
a heap, and the depth at which the gain is too small."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from heapq import heappop, heappush

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_trees import Path, compare_trees, draft_row
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks


@oracle_test("opt-tree")
def opt_tree() -> Iterator[Check]:
    """The n most probable nodes of the whole tree; levels are added while they add more than
    delta. Samples under the rejection rule for chosen siblings follow the target."""

    yield from penalty_checks("opt-tree")

    def best(text: list[int], temperature: float, size: int, delta: float) -> list[Path]:
        before, nodes = 0.0, []
        for depth in range(1, 11):
            nodes = _likeliest(text, temperature, size, depth)
            total = sum(weight for weight, _ in nodes)
            if total - before <= delta:
                break
            before = total
        return [path for _, path in nodes]

    for key, size, delta in (
        ("opt-tree", 16, 0.5),
        ("opt-tree:size=8,delta=0.2", 8, 0.2),
        ("opt-tree:size=2,delta=0.7", 2, 0.7),  # often one level, whose two weights sum to less
    ):
        # At temperature 0.1 the draft model is confident, so trees reach the maximum depth.
        yield from compare_trees(
            key, partial(best, size=size, delta=delta), ordered=False, temperatures=(0.0, 0.8, 0.1)
        )
    yield from rejection_checks("opt-tree", kind="point")


def _likeliest(
    text: list[int], temperature: float, size: int, depth: int
) -> list[tuple[float, Path]]:
    heap: list[tuple[float, Path]] = [(-1.0, ())]
    nodes: list[tuple[float, Path]] = []
    while heap and len(nodes) <= size:
        negative, path = heappop(heap)
        nodes.append((-negative, path))
        if len(path) < depth:
            row = draft_row(text, path, temperature)
            keys = np.array([key for _, key in row.values()])
            beliefs = np.exp(keys - keys.max())
            for token, belief in zip(row, beliefs / beliefs.sum(), strict=True):
                heappush(heap, (negative * float(belief), (*path, token)))
    return nodes[1:]
