"""Draft trees of a fixed shape over a draft model (Miao et al., "SpecInfer: Accelerating Large
Language Model Serving with Tree-based Speculative Inference", arXiv:2305.09781)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import Speculative
from anydecode.decoders.speculative.draft_trees import GrowingTree, TreeDrafter
from anydecode.decoders.speculative.static_trees import Shape
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.tree import ROOT

#: One spine of five with side branches that thin out: 12 nodes.
DEFAULT = "0 1 2 00 01 10 000 001 010 0000 0001 00000"


class FixedTreeDrafter(TreeDrafter):
    """Fills `shape` with the draft model's guesses, best first, one pass per level."""

    def __init__(self, shape: Shape, with_probabilities: bool = False) -> None:
        super().__init__(with_probabilities)
        self.shape = shape

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        shape = self.shape
        placed: dict[int, int] = {ROOT: ROOT}
        parents, ranks = shape.parents[:size], shape.ranks[:size]
        for node, (above, rank) in enumerate(zip(parents, ranks, strict=True)):
            parent = placed.get(above)
            if parent is None:
                continue
            if parent not in growing.guesses:
                wanted = {placed[other] for other in parents[node:] if other in placed}
                yield from growing.expand(sorted(wanted - set(growing.guesses)))
            tokens = growing.guesses[parent].tokens
            if rank < len(tokens):
                placed[node] = growing.add(int(tokens[rank]), parent)
        return list(range(len(growing.tree)))


@register(
    Card(
        "fixed-tree",
        "speculative",
        paper="SpecInfer (arXiv:2305.09781), its expansion-based trees with one draft model",
        exactness="token-exact",
        summary="The draft model's best guesses fill a tree of a fixed shape.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "any shape of rank paths, not only a number of children per level",
            "the draft distribution is cut to its 64 likeliest tokens",
            "siblings are the best by draft probability plus the noise the target will use",
        ),
    )
)
def fixed_tree(shape: str = DEFAULT, with_probabilities: bool = False) -> Speculative:
    """`shape` lists rank paths: "0 1 00" is two first guesses and one behind the better."""
    try:
        paths = [tuple(int(rank) for rank in path) for path in str(shape).split()]
        chosen = Shape.of(paths)
    except ValueError as error:
        raise InvalidRequestError(f"shape={shape!r} is no tree: {error}") from None
    return Speculative(FixedTreeDrafter(chosen, with_probabilities), max(1, len(chosen)))
