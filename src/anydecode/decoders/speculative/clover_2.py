"""Clover-2: a drafter whose state takes in each drafted token behind layers of its own, distilled
from the target's states.

Xiao et al., "Clover-2: Accurate Inference for Regressive Lightweight Speculative Decoding",
arXiv:2408.00264.

The drafter is the model of the runner "draft" (`models/clover.py` opens published ones). The tree
is that of `clover`.
"""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import TREE_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.clover import MIN_SHARE, REMOTE, VERIFICATION, CloverDrafter
from anydecode.decoders.speculative.draft_model import LEARNED


@register(
    Card(
        "clover-2",
        "speculative",
        paper="Clover-2 (arXiv:2408.00264)",
        exactness="token-exact",
        summary="Clover whose state passes layers that learn the target's states.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            LEARNED,
            "`anydecode train drafter --recipe clover-2` has the factors of the code, 10 of the"
            " distance to the target's states and 0.7 from head to head, and embeds tokens as the"
            " target does (the code: by the rows of the target's head); drafters that embed either"
            " way open",
            "8 nodes of up to 5 heads by default (the code: 20), with probabilities over all"
            " tokens (the code: over the 20 most probable ones)",
            "candidates below a quarter of the best one's probability are dropped, as in Clover,"
            " so that so few nodes reach several levels; in the code this rule is written, but"
            " left out (min_share=0)",
            *VERIFICATION,
            "the code draws siblings without replacement and verifies them by the rule for that; "
            + TREE_NOISE,
        ),
        remote=REMOTE,
    )
)
def clover_2(
    size: int = 8,
    depth: int = 5,
    top_p: float = 0.95,
    min_share: float = MIN_SHARE,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Clover-2's draft trees.

    Args:
        size: Number of verified nodes.
        depth: Number of levels, one head each, if the draft model has so many.
        top_p: The probability mass of a node's candidates that may be drafted, above 0.
        min_share: The share of the best candidate's probability that they have at least.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(CloverDrafter(depth, top_p, rule, min_share), size, rule)
