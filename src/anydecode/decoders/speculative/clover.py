"""Clover: a drafter whose state takes in each drafted token, and trees for a budget of few tokens.

Xiao et al., "Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge",
arXiv:2405.00263.

The drafter is the model of the runner "draft" (`models/clover.py` opens it). The tree grows level
by level, one head and one pass per level. Improbable candidates of a node are dropped, and of a
level's candidates as many are kept as the levels before have left of the budget.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from anydecode.catalogue import Bounds, Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.framework.rejection import (
    ACCEPTANCE_WORDS,
    CHOSEN_NOISE,
    acceptance_rule,
)
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import LEARNED
from anydecode.decoders.speculative.draft_trees import TreeDrafter
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.tree import ROOT

#: What the cards of Clover and Clover-2 say of verification, and what requests may set.
VERIFICATION = (
    "verified token-exactly, and above temperature 0 a node's weight is its estimated acceptance"
    " probability given the noise that the target will use; with acceptance='rejection' it is the"
    " draft probability, and the rule is that for chosen tokens",
    CHOSEN_NOISE,
    "with a draft model without such heads, the same tree with that model",
    "at most the last 2,048 tokens of a prompt that were not cached are read",
)
REMOTE: dict[str, Bounds] = {
    "size": Range(1, 64),
    "depth": Range(1, 32),
    "top_p": Range(0, 1),
    "min_share": Range(0, 1),
    "acceptance": ACCEPTANCE_WORDS,
}
#: Candidates with less than this share of the best one's probability are dropped by default.
MIN_SHARE = 0.25


class CloverDrafter(TreeDrafter):
    """Keeps of each node the candidates within the mass `top_p` that have at least `min_share` of
    the best one's probability, and of each level those with the largest path probabilities that the
    levels before have left of the budget. A path's probability is the product of the estimated
    acceptance probabilities along it."""

    def __init__(
        self,
        depth: int = 5,
        top_p: float = 0.95,
        rule: Acceptance | None = None,
        min_share: float = MIN_SHARE,
    ) -> None:
        super().__init__(rule)
        if depth < 1 or not 0 < top_p <= 1 or not 0 <= min_share <= 1:
            raise InvalidRequestError(
                f"depth is {depth}, top_p {top_p} and min_share {min_share}; allowed are a depth"
                " from 1, a mass above 0, at most 1, and a share from 0 to 1"
            )
        self.depth = depth
        self.top_p = top_p
        self.min_share = min_share

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        weights = {ROOT: 1.0}
        level, kept = [ROOT], list[int]()
        for depth in range(min(self.depth, growing.num_heads or self.depth)):
            if depth:
                yield from growing.expand(level)
            children = []
            for parent in level:
                candidates = growing.candidates[parent]
                chances = self._probable(candidates.acceptance_probabilities)
                for token, chance in zip(candidates.tokens, chances, strict=False):
                    node = growing.add(int(token), parent)
                    weights[node] = weights[parent] * float(chance)
                    children.append(node)
            best = sorted(children, key=lambda node: -weights[node])
            level = sorted(best[: size - len(kept)])
            kept += level
            if not level or len(kept) == size:
                break
        return kept

    def _probable(self, chances: np.ndarray) -> np.ndarray:
        """The leading ones of falling `chances` that are kept: at least one, if there is any."""
        if not len(chances):
            return chances
        is_kept = (chances.cumsum() <= self.top_p) & (chances >= self.min_share * chances[0])
        return chances[: max(1, int(is_kept.sum()))]


@register(
    Card(
        "clover",
        "speculative",
        paper="Clover (arXiv:2405.00263)",
        exactness="token-exact",
        summary="Heads take in each drafted token; the most probable ones share a small budget.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "the drafters, of which no files or code are published, have a layout of ours"
            " (`anydecode train drafter --recipe clover`): one layer behind the target's last"
            " state, then per head an attention decoder for the token drafted before and an MLP"
            " x + silu(W x + b); as in the code of Clover-2, the state is that before the final"
            " norm, a cosine weighs the attention to the token without a product behind it, and a"
            " norm stands before the target's head; 3 heads by default, which learn the tokens of"
            " the model's own answers with equal weights",
            LEARNED,
            "the heads are trained with the target's embeddings of the drafted tokens",
            "8 nodes of up to 5 heads by default (the paper: 4 nodes)",
            *VERIFICATION,
        ),
        remote=REMOTE,
    )
)
def clover(
    size: int = 8,
    depth: int = 5,
    top_p: float = 0.95,
    min_share: float = MIN_SHARE,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Clover's draft trees.

    Args:
        size: Number of verified nodes.
        depth: Number of levels, one head each, if the draft model has so many.
        top_p: The probability mass of a node's candidates that may be drafted, above 0.
        min_share: The share of the best candidate's probability that they have at least.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(CloverDrafter(depth, top_p, rule, min_share), size, rule)
