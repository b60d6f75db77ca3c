"""Draft trees of a fixed shape, in which a node is the rank of a token among its parent's
candidates.

A shape is a list of rank paths, level by level: (0,) is the best candidate, (0, 1) the second
candidate after it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import prod
from typing import Any

from anydecode.errors import InvalidRequestError
from anydecode.scoring.tree import ROOT, TokenTree

RankPath = tuple[int, ...]


@dataclass(frozen=True)
class TreeShape:
    """Nodes level by level: `parents[i]` (`ROOT` on the first level) and `ranks[i]`."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @staticmethod
    def of(paths: Seq[RankPath]) -> TreeShape:
        """The shape with these rank paths; the parent of each path must be among them."""
        ordered = sorted(set(paths), key=lambda path: (len(path), path))
        positions: dict[RankPath, int] = {(): ROOT}
        parents = []
        for node, path in enumerate(ordered):
            if path[:-1] not in positions:
                raise ValueError(f"{path} hangs on a path that is not in the shape")
            parents.append(positions[path[:-1]])
            positions[path] = node
        return TreeShape(tuple(parents), tuple(path[-1] for path in ordered))

    @staticmethod
    def chain(length: int) -> TreeShape:
        """The shape of a chain of best candidates, `length` deep."""
        return TreeShape.of([(0,) * depth for depth in range(1, length + 1)])

    def __len__(self) -> int:
        return len(self.parents)

    def fill(
        self, candidates: Callable[[TokenTree, int], Seq[int]], size: int, **fields: Any
    ) -> TokenTree:
        """The tree of the first `size` nodes, filled with tokens.

        Args:
            candidates: `candidates(tree, node)` returns the tokens that may follow a tree node
                (`ROOT`: the text), best first. A node whose rank is beyond them is left out, with
                all below.
            size: Maximum number of nodes.
            fields: Passed to `TokenTree`.
        """
        tree = TokenTree(**fields)
        tree_nodes: list[int | None] = []
        node_candidates: dict[int, Seq[int]] = {}
        for parent, rank in zip(self.parents[:size], self.ranks[:size], strict=True):
            parent_node = ROOT if parent == ROOT else tree_nodes[parent]
            if parent_node is None:
                tree_nodes.append(None)
                continue
            if parent_node not in node_candidates:
                node_candidates[parent_node] = candidates(tree, parent_node)
            tokens = node_candidates[parent_node]
            tree_nodes.append(tree.add(tokens[rank], parent_node) if rank < len(tokens) else None)
        return tree


def worthwhile(paths: Seq[RankPath], rates: Seq[float], row_cost: float) -> TreeShape:
    """The part of a shape with the most expected tokens per cost of a pass.

    Args:
        paths: Rank paths of the shape.
        rates: `rates[r]` is the acceptance rate of the candidate of rank r.
        row_cost: Cost of one more row, relative to a pass over one row.

    Raises:
        InvalidRequestError: If `row_cost` is negative.
    """
    if row_cost < 0:
        raise InvalidRequestError(f"row_cost={row_cost} must be at least 0")
    values = {
        path: prod(rates[rank] if rank < len(rates) else 0.0 for rank in path) for path in paths
    }
    ordered = sorted(values, key=lambda path: (-values[path], len(path), path))
    best, best_gain, expected = 0, 1.0, 1.0
    for count, path in enumerate(ordered, 1):
        expected += values[path]
        gain = expected / (1 + row_cost * count)
        if gain > best_gain:
            best, best_gain = count, gain
    return TreeShape.of(ordered[: max(best, 1)])
