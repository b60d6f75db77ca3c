"""Draft trees of a fixed shape from a draft model (Miao et al., "SpecInfer: Accelerating Large
Language Model Serving with Tree-based Speculative Inference", arXiv:2305.09781).

Each node of the shape takes a given rank among the draft model's candidates after its parent. Each
level of the tree is one pass of the draft model.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from anydecode.catalogue import Card, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHOSEN_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_trees import TreeDrafter
from anydecode.decoders.speculative.static_trees import TreeShape
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.tree import ROOT

#: A chain of five with side branches: 12 nodes.
DEFAULT = "0 1 2 00 01 10 000 001 010 0000 0001 00000"


class FixedTreeDrafter(TreeDrafter):
    """Fills `shape` with the draft model's best candidates, one pass per level."""

    def __init__(self, shape: TreeShape, rule: Acceptance | None = None) -> None:
        super().__init__(rule)
        self.shape = shape

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        shape = self.shape
        tree_nodes: dict[int, int] = {ROOT: ROOT}
        parents, ranks = shape.parents[:size], shape.ranks[:size]
        for node, (shape_parent, rank) in enumerate(zip(parents, ranks, strict=True)):
            parent = tree_nodes.get(shape_parent)
            if parent is None:
                continue
            if parent not in growing.candidates:
                needed = {tree_nodes[other] for other in parents[node:] if other in tree_nodes}
                yield from growing.expand(sorted(needed - set(growing.candidates)))
            tokens = growing.candidates[parent].tokens
            if rank < len(tokens):
                tree_nodes[node] = growing.add(int(tokens[rank]), parent)
        return list(range(len(growing.tree)))


@register(
    Card(
        "fixed-tree",
        "speculative",
        paper="SpecInfer (arXiv:2305.09781), its expansion-based trees with one draft model",
        exactness="token-exact",
        summary="The draft model's most probable tokens fill a tree of fixed shape.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "any shape of rank paths, not only a number of children per level",
            "trees of several draft models are not merged (see `taps`)",
            "the draft distribution is cut to its 64 most probable tokens",
            "verified token-exactly: siblings are the best by draft probability plus the noise that"
            " the target will use; with acceptance='rejection' they are the most probable, verified"
            " by the rule for chosen siblings",
            CHOSEN_NOISE,
        ),
        remote={"acceptance": ACCEPTANCE_WORDS},
    )
)
def fixed_tree(shape: str = DEFAULT, acceptance: str | Acceptance = "token-exact") -> Speculative:
    """Draft trees of a fixed shape.

    Args:
        shape: Rank paths, separated by spaces: "0 1 00" is the two best candidates, and one after
            the better.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    try:
        paths = [tuple(int(rank) for rank in path) for path in str(shape).split()]
        tree_shape = TreeShape.of(paths)
    except ValueError as error:
        raise InvalidRequestError(f"shape={shape!r} is not a tree: {error}") from None
    rule = acceptance_rule(acceptance)
    return Speculative(FixedTreeDrafter(tree_shape, rule), max(1, len(tree_shape)), rule)
