"""EAGLE: a drafter of few layers that reads the target's states beside the tokens, and a draft tree
that follows its confidence.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv:2401.15077;
"EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", arXiv:2406.16858; "EAGLE-3:
Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
arXiv:2503.01840.

The drafter is the model of the runner "draft" (`models/draft_heads.py` opens published ones). It
reads the target's state at the position before each token, and its own state where the target has
not computed one (`scoring/draft_states.py`). The tree is that of EAGLE-2: each level expands the
`width` nodes with the largest path probabilities, and the `size` best nodes of all levels are
verified.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHOSEN_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import LEARNED
from anydecode.decoders.speculative.draft_trees import TreeDrafter
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction


class EagleDrafter(TreeDrafter):
    """Expands the `width` nodes of each level with the largest path probabilities into `width`
    children each, `depth` times, and keeps the best nodes of all levels. A node's weight is the
    product of the estimated acceptance probabilities along its path."""

    def __init__(self, depth: int = 4, width: int = 4, rule: Acceptance | None = None) -> None:
        super().__init__(rule)
        if depth < 1 or width < 1:
            raise InvalidRequestError(
                f"depth and width must be at least 1, not {depth} and {width}"
            )
        self.depth = depth
        self.width = width

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        return (yield from growing.grow_best(size, self.depth, self.width))


@register(
    Card(
        "eagle",
        "speculative",
        paper="EAGLE, EAGLE-2, EAGLE-3 (arXiv:2401.15077, 2406.16858, 2503.01840)",
        exactness="token-exact",
        summary="A small head drafts a tree from the target's hidden states, level by level.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly, and above temperature 0 a node's weight is its estimated"
            " acceptance probability given the noise that the target will use; the rule of EAGLE-2"
            " and 3, with weights by draft probability, is acceptance='rejection'",
            CHOSEN_NOISE,
            "8 nodes in 4 levels of 4 by default (the papers: 60 nodes in 8 levels of 10), which"
            " is faster on processors",
            "drafters of the first paper draft such trees, too; with `fixed-tree` they draft a tree"
            " of a fixed shape, and with `rsd` one of drawn siblings (the paper: both, 25 nodes)",
            LEARNED,
            "in 3 unrolled steps (EAGLE-3: 7), of which each counts 0.8 times the one before;"
            " --recipe eagle, which is unrolled as in HASS (arXiv:2408.15766), adds the distance to"
            " the target's states (EAGLE: one step, 0.1 times the cross entropy and the distance,"
            " and noise in the states)",
            "with a draft model that reads no states, the same tree with that model",
            "at most the last 2,048 tokens of a prompt that were not cached are read",
        ),
        remote={
            "size": Range(1, 64),
            "depth": Range(1, 32),
            "width": Range(1, 16),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def eagle(
    size: int = 8,
    depth: int = 4,
    width: int = 4,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """EAGLE's draft trees.

    Args:
        size: Number of verified nodes.
        depth: Number of levels, one pass of the drafter each.
        width: Number of nodes that each level expands, and of children of each of them.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(EagleDrafter(depth, width, rule), size, rule)
