"""DFlash: a drafter that predicts a block of tokens in one pass, from the target's states of the
text.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv:2602.06036; "DSpark",
arXiv:2607.05147, whose drafters have heads that make each slot depend on the token before;
"Domino", arXiv:2605.29707, on all tokens of the block before; DFlash2, whose layers convolve the
rows of a block, and whose selector chooses among a slot's most probable tokens by the token before;
"P-EAGLE", arXiv:2602.01469, which makes the drafter of EAGLE-3 predict a block; "PARD",
arXiv:2504.18583, a draft model that was trained to; "DDTree", arXiv:2604.12989, the best-first
tree over the slots.

The drafter is the model of the runner "draft" (`models/block_drafters.py` and
`models/draft_heads.py` open published ones; PARD is a language model with a mask token). The
context of DFlash and DSpark, the projected states of the target at every position that the target
has computed, is stored once per token as the keys and values of every layer. The block is the
text's last token, followed by mask tokens.
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
        "dflash",
        "speculative",
        paper=(
            "DFlash (arXiv:2602.06036), DSpark (arXiv:2607.05147), Domino (arXiv:2605.29707),"
            " P-EAGLE (arXiv:2602.01469), PARD (arXiv:2504.18583), DDTree (arXiv:2604.12989)"
        ),
        exactness="token-exact",
        summary="A small drafter predicts a block of tokens in one pass.",
        needs=("block drafter",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "7 drafted tokens at most, in a block of as many rows as these need (the papers: the"
            " block that the drafter was trained with, often 16 rows)",
            "drafts end where the estimated probability that they are accepted falls below 0.1,"
            " which is faster on processors (threshold=0: they do not)",
            "DSpark's confidences end drafts where their product along the path falls below that"
            " threshold, and are used as they are; the paper calibrates them by a temperature per"
            " slot, and its scheduler maximises the tokens of all requests of a batch",
            "verified token-exactly, and above temperature 0 a slot's token is sampled with the"
            " noise that the target will use; with acceptance='rejection' slots have their most"
            " probable tokens, verified by the rule for chosen tokens, as DFlash's code does",
            CHOSEN_NOISE,
            "at most the last 2,048 tokens of a prompt that were not cached are read (by PARD, all:"
            " it reads no states)",
            LEARNED,
            "each slot counts 0.8 times the one before (the papers: cross entropy with the texts'"
            " tokens, mixed with total variation in DSpark, and other factors)",
            "such drafters have two layers of DFlash or DSpark (the papers: 5) or one of P-EAGLE"
            " (4), blocks of 5 or 4 drafts, and with DSpark a bias of rank 64 (256)",
            "DFlash2, whose paper is not published: as its checkpoints and their readers have it;"
            " above temperature 0 a token is sampled among the selector's, with the noise that the"
            " target will use",
            "PARD-2 drafts in the mode of its paper that reads no features of the target",
        ),
        remote={
            "size": Range(1, 64),
            "threshold": Range(0, 1),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def dflash(
    size: int = 7,
    tree: bool = False,
    threshold: float = 0.1,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """Blocks drafted in one pass (DFlash, DFlash2, DSpark, Domino, P-EAGLE, PARD).

    Args:
        size: Maximum number of drafted tokens; the block has no more slots than the drafter was
            trained with.
        tree: Draft the `size` best nodes of the tree over the slots' tokens (DDTree), instead of
            one token per slot.
        threshold: The estimated acceptance probability below which nothing is drafted.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(BlockDrafter(tree, threshold, rule), size, rule)
