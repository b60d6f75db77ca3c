"""Draft trees of the nodes with the largest path probabilities: shared code of methods with one
head per drafted token."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.speculative.draft_trees import TreeDrafter
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.tree import ROOT


class BestTreeDrafter(TreeDrafter):
    """Grows the tree of up to `depth` levels that has the nodes with the largest weights: the
    product of the estimated acceptance probabilities along a node's path. A weight is at most that
    of the parent, so only nodes among the best so far are expanded."""

    def __init__(self, depth: int = 4, rule: Acceptance | None = None) -> None:
        super().__init__(rule)
        if depth < 1:
            raise InvalidRequestError("a draft tree needs depth >= 1")
        self.depth = depth

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        weights = {ROOT: 1.0}
        level, best = [ROOT], list[int]()
        for depth in range(min(self.depth, growing.num_heads or self.depth)):
            if depth:
                yield from growing.expand(level)
            first = len(growing.tree)
            for parent in level:
                candidates = growing.candidates[parent]
                chances = candidates.acceptance_probabilities[:size]
                for token, chance in zip(candidates.tokens[:size], chances, strict=True):
                    node = growing.add(int(token), parent)
                    weights[node] = weights[parent] * float(chance)
            nodes = [node for node in weights if node != ROOT]
            best = sorted(nodes, key=lambda node: -weights[node])[:size]
            level = sorted(node for node in best if node >= first)
            if not level:
                break
        return sorted(best)
