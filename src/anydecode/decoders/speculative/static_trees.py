"""Trees whose shape is fixed in advance: a node is the rank it takes among its parent's guesses.

A shape is a list of rank paths, level by level: (0,) is the best guess, (0, 1) the second guess
behind it.
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
class Shape:
    """Nodes level by level: `parents[i]` (`ROOT` on the first level) and `ranks[i]`."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @staticmethod
    def of(paths: Seq[RankPath]) -> Shape:
        """The shape with these rank paths; the parent of each must be among them."""
        ordered = sorted(set(paths), key=lambda path: (len(path), path))
        positions: dict[RankPath, int] = {(): ROOT}
        parents = []
        for node, path in enumerate(ordered):
            if path[:-1] not in positions:
                raise ValueError(f"{path} hangs on a path that is not in the shape")
            parents.append(positions[path[:-1]])
            positions[path] = node
        return Shape(tuple(parents), tuple(path[-1] for path in ordered))

    @staticmethod
    def chain(length: int) -> Shape:
        """The best guess behind the best guess, `length` deep."""
        return Shape.of([(0,) * depth for depth in range(1, length + 1)])

    def __len__(self) -> int:
        return len(self.parents)

    def fill(
        self, guesses: Callable[[TokenTree, int], Seq[int]], size: int, **fields: Any
    ) -> TokenTree:
        """The tree of the first `size` nodes. `guesses(tree, node)` gives the tokens that may
        follow a tree node (`ROOT`: the text), best first; ranks beyond them stay empty, with all
        below. `fields` are the tree's."""
        tree = TokenTree(**fields)
        placed: list[int | None] = []
        known: dict[int, Seq[int]] = {}
        for parent, rank in zip(self.parents[:size], self.ranks[:size], strict=True):
            above = ROOT if parent == ROOT else placed[parent]
            if above is None:
                placed.append(None)
                continue
            if above not in known:
                known[above] = guesses(tree, above)
            tokens = known[above]
            placed.append(tree.add(tokens[rank], above) if rank < len(tokens) else None)
        return tree


def worthwhile(paths: Seq[RankPath], rates: Seq[float], row_cost: float) -> Shape:
    """The part of a shape that gives the most expected tokens per cost of a pass. `rates[r]` is how
    often the guess of rank r is right, `row_cost` what one more row costs, in passes of one row, at
    least 0 (else `InvalidRequestError`)."""
    if row_cost < 0:
        raise InvalidRequestError(f"row_cost={row_cost}: a row cannot cost less than nothing")
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
    return Shape.of(ordered[: max(best, 1)])
