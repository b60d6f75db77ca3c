"""Draft trees grown where acceptance is likeliest (Xiong et al., "DySpec: Faster Speculative
Decoding with Dynamic Token Tree Structure", arXiv:2410.11744)."""

from __future__ import annotations

from collections.abc import Generator
from heapq import heappop, heappush
from typing import Any

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import Speculative
from anydecode.decoders.speculative.draft_trees import GrowingTree, TreeDrafter
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.tree import ROOT


class DySpecDrafter(TreeDrafter):
    """A heap of next draws. A draw of value v at a node gives a child y, a further draw there of
    value v (1 - R[y]), and a first draw behind y of value v R[y], where R is what is left of the
    draft distribution, normalised."""

    kind = "wor"

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        heap: list[tuple[float, int, int, float]] = []  # -value, order, node, what is left
        order = 0

        def push(value: float, node: int, left: float) -> None:
            nonlocal order
            order += 1
            heappush(heap, (-value, order, node, left))

        push(1.0, ROOT, 1.0)
        while heap and len(growing.tree) < size:
            negative, _, parent, left = heappop(heap)
            if parent not in growing.guesses:
                # A value is known before its node is scored: all nodes that wait run in one pass.
                waiting = [node for node in range(len(growing.tree)) if node not in growing.guesses]
                yield from growing.expand(waiting)
            guesses = growing.guesses[parent]
            drawn = len(growing.tree.children(parent))
            if drawn >= len(guesses.tokens):
                continue
            share = min(1.0, float(guesses.probabilities[drawn]) / max(left, 1e-12))
            node = growing.add(int(guesses.tokens[drawn]), parent)
            push(-negative * (1 - share), parent, left - float(guesses.probabilities[drawn]))
            push(-negative * share, node, 1.0)
        return list(range(len(growing.tree)))


@register(
    Card(
        "dyspec",
        "speculative",
        paper="DySpec (arXiv:2410.11744)",
        exactness="token-exact",
        summary="A heap grows the draft tree where acceptance is likeliest.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly with the target's noise",
            "nodes are scored in batches when the heap first needs one of them, with the same tree"
            " as one by one",
            "at temperature 0 draws follow the draft model's order",
            "the draft distribution is cut to its 64 likeliest tokens",
            "drafts at the request's temperature (the paper: 0.6), 16 nodes (64)",
        ),
    )
)
def dyspec(size: int = 16, with_probabilities: bool = False) -> Speculative:
    """DySpec with trees of `size` nodes (the paper: 64)."""
    return Speculative(DySpecDrafter(with_probabilities), size)
