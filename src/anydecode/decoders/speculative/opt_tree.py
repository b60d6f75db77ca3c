"""OPT-Tree: the draft tree with the largest expected number of accepted tokens (Wang et al.,
"OPT-Tree: Speculative Decoding with Adaptive Draft Tree Structure", arXiv:2406.17276).

The tree grows level by level. The nodes with the largest path probabilities are verified. Growth
stops when a level adds too little to their sum.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHOSEN_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_trees import TreeDrafter
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.tree import ROOT


class OptTreeDrafter(TreeDrafter):
    """Adds the `size` best nodes per level, while the sum of the `size` best weights of all levels
    grows by more than `delta`, up to `depth` levels. A node's weight is the product of the
    estimated acceptance probabilities along its path."""

    def __init__(self, delta: float = 0.5, depth: int = 10, rule: Acceptance | None = None) -> None:
        super().__init__(rule)
        if delta < 0 or depth < 1:
            raise InvalidRequestError("opt-tree needs delta >= 0 and depth >= 1")
        self.delta = delta
        self.depth = depth

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        weights = {ROOT: 1.0}
        frontier, total = [ROOT], 0.0
        for depth in range(1, self.depth + 1):
            if depth > 1:
                yield from growing.expand(frontier)
            options = [
                (weights[node] * float(probability), node, int(token))
                for node in frontier
                for probability, token in zip(
                    growing.candidates[node].acceptance_probabilities[:size],
                    growing.candidates[node].tokens[:size],
                    strict=True,
                )
            ]
            options.sort(key=lambda option: -option[0])
            frontier = []
            for weight, parent, token in options[:size]:
                node = growing.add(token, parent)
                weights[node] = weight
                frontier.append(node)
            best = _best(weights, size)
            gain = sum(weights[node] for node in best) - total
            total += gain
            if gain <= self.delta:
                break
        return sorted(best)


def _best(weights: dict[int, float], size: int) -> list[int]:
    nodes = [node for node in weights if node != ROOT]
    return sorted(nodes, key=lambda node: -weights[node])[:size]


@register(
    Card(
        "opt-tree",
        "speculative",
        paper="OPT-Tree (arXiv:2406.17276)",
        exactness="token-exact",
        summary="Keeps the nodes with the largest path probabilities; stops at small gains.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "the gain includes the newest level",
            "verified token-exactly, and above temperature 0 a node's weight is its estimated"
            " acceptance probability given the noise that the target will use; with"
            " acceptance='rejection' it is the draft probability, as in the paper",
            CHOSEN_NOISE,
            "the draft distribution is cut to its 64 most probable tokens",
            "16 nodes by default (the paper: 50)",
        ),
        remote={
            "size": Range(1, 64),
            "delta": Range(0, 10),
            "depth": Range(1, 32),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def opt_tree(
    size: int = 16,
    delta: float = 0.5,
    depth: int = 10,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """OPT-Tree.

    Args:
        size: Number of verified nodes (the paper: 50).
        delta: Minimum gain of a further level, in expected tokens.
        depth: Maximum depth.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(OptTreeDrafter(delta, depth, rule), size, rule)
