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
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

RankPath = tuple[int, ...]
#: A shape that saves time is computed again after so many tokens.
REFRESH = 64
#: Number of observations that the prior of a rate counts as.
PRIOR_WEIGHT = 32


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


def worthwhile(
    paths: Seq[RankPath], rates: Seq[float], cost: Callable[[int], float], num_others: int = 0
) -> TreeShape:
    """The part of a shape with the most expected tokens per cost of a pass; empty if none
    saves time.

    Args:
        paths: Rank paths of the shape.
        rates: `rates[r]` is the acceptance rate of the candidate of rank r.
        cost: `cost(rows)` is the cost of a pass, in any unit.
        num_others: Rows of other sequences in the pass, each of which brings one token.
    """
    values = {
        path: prod(rates[rank] if rank < len(rates) else 0.0 for rank in path) for path in paths
    }
    ordered = sorted(values, key=lambda path: (-values[path], len(path), path))
    expected, rows = 1.0 + num_others, 1 + num_others
    best, best_gain = 0, expected / cost(rows)
    for count, path in enumerate(ordered, 1):
        expected += values[path]
        gain = expected / cost(rows + count)
        if gain > best_gain:
            best, best_gain = count, gain
    return TreeShape.of(ordered[:best])


class WorthwhileTree:
    """The part of a shape that saves time: by the measured costs of passes, and by acceptance rates
    of ranks that are counted while texts are generated.

    Args:
        paths: Rank paths of the shape.
        priors: Acceptance rate by rank before anything was counted.
        row_cost: The cost of one more row, relative to a pass over one row; 0: all nodes; None:
            measured costs.

    Raises:
        InvalidRequestError: If `row_cost` is negative.
    """

    def __init__(
        self, paths: Seq[RankPath], priors: Seq[float], row_cost: float | None = None
    ) -> None:
        if row_cost is not None and row_cost < 0:
            raise InvalidRequestError(f"row_cost={row_cost} must be at least 0")
        self.paths = paths
        self.priors = priors
        self.row_cost = row_cost
        self.clear()

    def clear(self) -> None:
        """Forget what was counted."""
        self._num_accepted = [0] * len(self.priors)
        self._num_seen = 0
        self._shapes: dict[tuple[int, int], TreeShape] = {}

    @property
    def rates(self) -> list[float]:
        """The acceptance rate of each rank."""
        total = self._num_seen + PRIOR_WEIGHT
        return [
            (count + PRIOR_WEIGHT * prior) / total
            for count, prior in zip(self._num_accepted, self.priors, strict=True)
        ]

    def record(self, candidates: Seq[int], token: int) -> None:
        """Count the rank of a generated token among the candidates for it."""
        self._num_seen += 1
        rank = candidates.index(token) if token in candidates else len(self.priors)
        if rank < len(self.priors):
            self._num_accepted[rank] += 1
        if self._num_seen % REFRESH == 0:
            self._shapes.clear()

    def shape(self, sequence: Sequence) -> TreeShape:
        """The shape for the next draft of `sequence`. Costs and rates are read again after every
        `REFRESH` tokens."""
        model, row_cost, context = sequence.cost_model, self.row_cost, sequence.length
        key = (model.num_others(), context // REFRESH) if row_cost is None else (0, 0)

        def cost(rows: int) -> float:
            return model.seconds(rows, context) if row_cost is None else 1 + row_cost * (rows - 1)

        if key not in self._shapes:
            self._shapes[key] = (
                TreeShape.of(self.paths)
                if row_cost == 0
                else worthwhile(self.paths, self.rates, cost, key[0])
            )
        return self._shapes[key]
