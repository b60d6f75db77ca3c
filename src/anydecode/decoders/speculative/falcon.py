"""Falcon: a drafter that predicts blocks of tokens, block after block, and a draft tree over them.

Gao et al., "Falcon: Faster and Parallel Inference of Large Language Models through Enhanced
Semi-Autoregressive Drafting and Custom-Designed Decoding Tree", arXiv:2412.12639.

The drafter is the model of the runner "draft" (`models/draft_heads.py` opens published ones). The
rows of the text's last k tokens see each other and predict the k tokens behind. Within a block, the
candidates of a position are the same behind all candidates before it. Each path through a block can
be the input of a further pass, whose k rows see each other again.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import (
    ACCEPTANCE_WORDS,
    CHOSEN_NOISE,
    TREE_NOISE,
    acceptance_rule,
)
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.block_drafter import BlockDrafter


@register(
    Card(
        "falcon",
        "speculative",
        paper="Falcon (arXiv:2412.12639)",
        exactness="token-exact",
        summary="A drafter predicts blocks of tokens, each in one pass from the block before.",
        needs=("block drafter",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "the cells of the LSTM start from zero in every row, as in the published code, which"
            " hands the rows to it as a batch (the paper: one row after the other)",
            "the last rows of the text, as many as a block has, always see each other; the code"
            " counts blocks from the first row of a pass, so that these rows may be of two blocks,"
            " of which the first does not see the second",
            "drafters of more than one layer, whose keys and values depend on where blocks begin,"
            " are refused",
            "the tree has the 8 nodes with the largest products of probabilities in up to 2 blocks,"
            " and none below 0.1 (the code: a fixed tree of 8 levels and 20 children of the root),"
            " which is faster on processors",
            "`anydecode train drafter --recipe falcon` learns with the loss of the other recipes"
            " beside the distance to the target's states, from the model's own answers, without"
            " noise in the states or dropout; it starts with the target's last layer, blocks that"
            " follow a block learn too, and what is shown to a block is not seen by those behind",
            "verified token-exactly, and above temperature 0 a node's weight is its estimated"
            " acceptance probability given the noise that the target will use; with"
            " acceptance='rejection' it is the draft probability, and the rule is that for chosen"
            " tokens",
            CHOSEN_NOISE,
            "the code draws siblings without replacement and verifies them by the rule for that; "
            + TREE_NOISE,
            "with a block drafter of another kind, the tree over one block of it",
            "at most the last 2,048 tokens of a prompt that were not cached are read",
        ),
        remote={
            "size": Range(1, 64),
            "blocks": Range(1, 16),
            "threshold": Range(0, 1),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def falcon(
    size: int = 8,
    blocks: int = 2,
    tree: bool = True,
    threshold: float = 0.1,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Falcon's draft trees.

    Args:
        size: Number of verified nodes.
        blocks: Number of blocks along a path, one pass of the drafter each.
        tree: Draft the best nodes of the tree over the tokens of all positions, instead of one
            token per position.
        threshold: The estimated acceptance probability below which nothing is drafted.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(BlockDrafter(tree, threshold, rule, blocks), size, rule)
