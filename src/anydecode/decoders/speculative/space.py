"""SPACE: candidates and mask tokens share one pass, which verifies and drafts.

Yi et al., "Generation Meets Verification: Accelerating Large Language Model Inference with Smart
Parallel Auto-Correct Decoding", arXiv:2402.11809.

With k masks, a pass has the last token and k masks, then each of k candidates and k masks:
(k + 1)^2 rows. The masks behind the last accepted candidate give the k candidates of the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.draft_candidates import draft_candidates
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHAIN_NOISE, acceptance_rule
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.mask_groups import MaskDrafter, MaskOutput
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree


class SpaceDrafter(MaskDrafter):
    """A chain of the best candidate of each mask; of a sample of each mask if the acceptance rule
    compares drafts with their distributions."""

    def __init__(self, num_masks: int, rule: Acceptance) -> None:
        self.num_masks = num_masks
        self.draws = rule.reads_probabilities

    def draft(
        self, sequence: Sequence, masks: Seq[MaskOutput], size: int
    ) -> tuple[TokenTree, dict[int, int]]:
        if size < self.num_masks:
            return TokenTree(), {}
        num_candidates = (size - self.num_masks) // (self.num_masks + 1)
        tree = self.candidates(sequence, masks[:num_candidates])
        return tree, dict.fromkeys((ROOT, *range(len(tree))), self.num_masks)

    def candidates(self, sequence: Sequence, masks: Seq[MaskOutput]) -> TokenTree:
        """The chain of one candidate of each of `masks`."""
        tree, node, sampler = TokenTree(kind="iid"), ROOT, sequence.sampler.fork()
        last = sequence.all_tokens[-1]
        for offset, mask in enumerate(masks):
            position = sequence.length + offset
            row = self.logits(sequence, sampler, mask, last)
            found = draft_candidates(sequence, sampler, row, position, 0 if self.draws else None)
            if not len(found.tokens):
                break
            if self.draws:
                tree.probabilities[node] = found.dense(len(row))
            last = int(found.tokens[0])
            node = tree.add(last, node)
            sampler.advance(last)
        return tree

    def logits(
        self, sequence: Sequence, sampler: Sampler, mask: MaskOutput, last: int
    ) -> np.ndarray:
        """The logits of a mask's candidates, float32 `[vocab_size]`.

        Args:
            sequence: The sequence to draft for.
            sampler: Its sampler, advanced by all tokens before.
            mask: What the mask has predicted.
            last: The token before.
        """
        return mask.logits


@register(
    Card(
        "space",
        "speculative",
        paper="SPACE (arXiv:2402.11809)",
        exactness="token-exact",
        summary="Mask tokens behind each candidate draft the next ones in the pass that verifies.",
        needs=("mask token",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "exact for the model that has learned the masks, as in the paper, not for the model"
            " that it was trained from",
            "above temperature 0 a candidate is sampled with the noise that the target will use,"
            " and verified token-exactly; with acceptance='rejection' it is drawn from the mask's"
            " distribution, and after a rejection the token comes from the residual distribution"
            " (the paper's code: from the target's, which is biased)",
            CHAIN_NOISE,
            "2 masks by default, 9 rows, which is faster on processors (the paper: 5, 36 rows)",
            "all masks are one token, the paper's default",
            "the first pass has no candidates (the paper's code: masks, which are rejected)",
            "anydecode train masks trains an adapter on the model's own answers, with groups of"
            " masks behind many of their tokens; the paper trains all weights on answers of a"
            " data set, half of which end at a random token, with one group behind it",
        ),
        bounds={"masks": Range(1, 32)},
        remote={"masks": Range(1, 8), "acceptance": ACCEPTANCE_WORDS},
    )
)
def space(masks: int = 2, acceptance: str | Acceptance = "token-exact") -> Speculative:
    """SPACE.

    Args:
        masks: Number of mask tokens of a group, and of candidates; a pass has (masks + 1)^2 rows.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(SpaceDrafter(masks, rule), masks * (masks + 2), rule)
