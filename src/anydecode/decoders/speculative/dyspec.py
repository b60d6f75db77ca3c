"""DySpec: draft trees grown where acceptance is most probable (Xiong et al., "DySpec: Faster
Speculative Decoding with Dynamic Token Tree Structure", arXiv:2410.11744).

A heap orders the possible next nodes by their estimated acceptance probability. The most probable
one is added until the tree has `size` nodes.
"""

from __future__ import annotations

from collections.abc import Generator
from heapq import heappop, heappush
from typing import Any

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, TREE_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_trees import TreeDrafter
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.tree import ROOT


class DySpecDrafter(TreeDrafter):
    """Grows the tree from a heap of next draws. A draw of value v at a node adds a child y. It
    pushes another draw at the node, of value v (1 - R[y]), and a first draw after y, of value v
    R[y]. R is the remaining draft distribution, normalised."""

    kind = "wor"

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        heap: list[tuple[float, int, int, float]] = []  # -value, order, node, remaining
        order = 0

        def push(value: float, node: int, remaining: float) -> None:
            nonlocal order
            order += 1
            heappush(heap, (-value, order, node, remaining))

        push(1.0, ROOT, 1.0)
        while heap and len(growing.tree) < size:
            negative_value, _, parent, remaining = heappop(heap)
            if parent not in growing.candidates:
                # A value is known before its node is scored, so all unscored nodes run in one pass.
                unscored = [
                    node for node in range(len(growing.tree)) if node not in growing.candidates
                ]
                yield from growing.expand(unscored)
            candidates = growing.candidates[parent]
            num_children = len(growing.tree.children(parent))
            if num_children >= len(candidates.tokens):
                continue
            probability = min(
                1.0, float(candidates.probabilities[num_children]) / max(remaining, 1e-12)
            )
            node = growing.add(int(candidates.tokens[num_children]), parent)
            push(
                -negative_value * (1 - probability),
                parent,
                remaining - float(candidates.probabilities[num_children]),
            )
            push(-negative_value * probability, node, 1.0)
        return list(range(len(growing.tree)))


@register(
    Card(
        "dyspec",
        "speculative",
        paper="DySpec (arXiv:2410.11744)",
        exactness="token-exact",
        summary="A heap grows the draft tree where acceptance is most probable.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly with the target's noise; the paper's rule is"
            " acceptance='rejection'",
            TREE_NOISE,
            "nodes are scored in batches when one of them is first needed; the tree is the same as"
            " one by one",
            "at temperature 0 draws follow the draft model's order of probability",
            "the draft distribution is cut to its 64 most probable tokens",
            "drafts at the request's temperature (the paper: 0.6), 16 nodes by default (the paper:"
            " 64)",
        ),
        remote={"size": Range(1, 64), "acceptance": ACCEPTANCE_WORDS},
    )
)
def dyspec(size: int = 16, acceptance: str | Acceptance = "token-exact") -> Speculative:
    """DySpec: dynamic draft trees.

    Args:
        size: Number of nodes of a draft tree (the paper: 64).
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(DySpecDrafter(rule), size, rule)
