"""ParallelSpec: a drafter of EAGLE's kind that predicts all tokens of a draft in one pass.

Xiao et al., "ParallelSpec: Parallel Drafter for Efficient Speculative Decoding", arXiv:2410.05589.

The drafter is the model of the runner "draft" (`models/draft_heads.py` opens it). Learned mask
tokens stand behind the text; the row of the last token predicts the next one, and each mask token
the one behind its position. The tree has candidates of every position below each one before.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHOSEN_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.block_drafter import BlockDrafter
from anydecode.decoders.speculative.draft_model import LEARNED


@register(
    Card(
        "parallelspec",
        "speculative",
        paper="ParallelSpec (arXiv:2410.05589)",
        exactness="token-exact",
        summary="Learned mask tokens behind the text predict a whole draft tree in one pass.",
        needs=("block drafter",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "in EAGLE's form; that of tokens alone, which replaces Medusa, is not included",
            "a mask token is an unused token's embedding beside a learned state of its own (the"
            " paper: an embedding of its own), which the projection makes the same inputs of",
            LEARNED,
            "each of 4 positions counts 0.8 times the one before, beside the distance to the"
            " target's states (the paper's factors and number of mask tokens are not known)",
            "of the product of the positions' candidates, the 8 nodes with the largest products of"
            " probabilities, and none below 0.1, which is faster on processors (threshold=0: all)",
            "verified token-exactly, and above temperature 0 a node's weight is its estimated"
            " acceptance probability given the noise that the target will use; with"
            " acceptance='rejection' it is the draft probability, and the rule is that for chosen"
            " tokens",
            CHOSEN_NOISE,
            "with a block drafter of another kind, the same tree with that drafter",
            "at most the last 2,048 tokens of a prompt that were not cached are read",
        ),
        remote={
            "size": Range(1, 64),
            "threshold": Range(0, 1),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def parallelspec(
    size: int = 8, threshold: float = 0.1, acceptance: str | Acceptance = "token-exact"
) -> Speculative:
    """ParallelSpec's draft trees.

    Args:
        size: Number of verified nodes; the tree has no more levels than the drafter was trained
            with.
        threshold: The estimated acceptance probability below which nothing is drafted.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(BlockDrafter(True, threshold, rule), size, rule)
