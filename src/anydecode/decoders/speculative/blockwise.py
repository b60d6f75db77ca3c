"""Blockwise parallel decoding: heads on the target's last state propose a block of tokens, and the
pass that verifies it also computes the state for the next block.

Stern et al., "Blockwise Parallel Decoding for Deep Autoregressive Models", arXiv:1811.03115.

The heads are the model of the runner "draft" (`models/blockwise.py` opens them). One pass runs all
of them on the target's state at the position before the last token, which the verification of the
last block has computed. The most likely token of each head is one token of the block.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import LEARNED
from anydecode.decoders.speculative.medusa import MedusaDrafter
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.tree import ROOT


class BlockwiseDrafter(MedusaDrafter):
    """A chain of the best candidate of each head, up to `depth`."""

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        node, nodes = ROOT, list[int]()
        for depth in range(min(size, growing.num_heads or size)):
            if depth:
                yield from growing.expand([node])
            tokens = growing.candidates[node].tokens
            if not len(tokens):
                break
            node = growing.add(int(tokens[0]), node)
            nodes.append(node)
        return nodes


@register(
    Card(
        "blockwise",
        "speculative",
        paper="Blockwise Parallel Decoding (arXiv:1811.03115)",
        exactness="token-exact",
        summary="Heads on the target's last state propose a block of tokens, verified together.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "the target is frozen and is itself the paper's first head, so that the text is that of"
            " plain decoding; in the paper's code the new layer changes the first head too",
            "the heads run in a pass of their own over the state that the verification has"
            " computed (the paper: in the same pass, at every position)",
            "the paper's selection among the most probable tokens is acceptance='top-m'; its"
            " distance rule for ordered outputs is not included, since tokens have no order",
            LEARNED,
            "all heads are trained in each step, and each counts 0.8 times the one before (the"
            " paper: one head, drawn at random)",
            "above temperature 0 a head's token is sampled with the noise that the target will use",
            "with a draft model that reads tokens, a chain of that model, one pass per token",
        ),
        remote={"size": Range(1, 32), "acceptance": ACCEPTANCE_WORDS},
    )
)
def blockwise(size: int = 4, acceptance: str | Acceptance = "token-exact") -> Speculative:
    """Blockwise parallel decoding.

    Args:
        size: Number of proposed tokens; as many heads run, if the draft model has so many.
        acceptance: "token-exact", "rejection", "typical", "top-m" (the paper's relaxed rule) or
            "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(BlockwiseDrafter(max(1, size), rule), size, rule)
