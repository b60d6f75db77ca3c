"""Hydra: heads on the target's last state, each of which also reads the tokens drafted before it.

Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv:2402.05109.

The heads are the model of the runner "draft" (`models/hydra.py` opens published ones). The tree
grows level by level, one head and one pass per level. The nodes with the largest products of head
probabilities are verified.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.best_tree import BestTreeDrafter
from anydecode.decoders.speculative.draft_model import LEARNED


@register(
    Card(
        "hydra",
        "speculative",
        paper="Hydra (arXiv:2402.05109)",
        exactness="token-exact",
        summary="Heads that read the target's state and the tokens drafted before them.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly; Medusa's rule, which the paper also uses, is"
            " acceptance='typical' (see typical-acceptance)",
            "the tree has the nodes with the largest products of head probabilities (the paper: a"
            " fixed tree of 63 nodes)",
            "8 nodes of up to 4 heads by default, which is faster on processors",
            "above temperature 0 a node's weight is its estimated acceptance probability given the"
            " noise that the target will use",
            LEARNED,
            "a head has 2 blocks, and each head counts 0.8 times the one before (Hydra++: 4 blocks,"
            " and cross entropy with the target's distributions)",
            "blocks of a head that shared one matrix in training are read as stored, a copy each",
            "with a draft model without such heads, the same tree with that model",
            "at most the last 2,048 tokens of a prompt that were not cached are read by Hydra++",
        ),
        remote={"size": Range(1, 64), "depth": Range(1, 32), "acceptance": ACCEPTANCE_WORDS},
    )
)
def hydra(
    size: int = 8, depth: int = 4, acceptance: str | Acceptance = "token-exact"
) -> Speculative:
    """Hydra heads.

    Args:
        size: Number of verified nodes.
        depth: Number of levels, one head each, if the draft model has so many.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(BestTreeDrafter(depth, rule), size, rule)
