"""Drafts from blocks, which the model of the runner "draft" predicts in one pass each."""

from __future__ import annotations

from typing import Any

from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.speculation import Drafter, DraftSession, Proposal
from anydecode.decoders.speculative.draft_blocks import BlockTree, score_block
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.tree import TokenTree


class _Session(DraftSession):
    learns_without_drafts = False

    def __init__(self, sequence: Sequence, drafter: BlockDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter

    def propose(self, size: int) -> Proposal:
        if size < 1:
            return TokenTree()
        drafter, spec = self.drafter, self.sequence.model(DRAFT).spec
        block: Any = spec.block
        scores = yield score_block(self.sequence, block, min(size, block.max_drafts))
        is_chain, has_noise = not drafter.tree, drafter.has_noise
        growing = BlockTree(self.sequence, scores, is_chain, drafter.threshold, has_noise)
        tree = growing.grow(size)
        if block.mask_token is not None:
            return tree
        for _ in range(drafter.blocks - 1):
            request = growing.next_blocks(size)
            if request is None:
                break
            growing.add((yield request))
            tree = growing.grow(size)
        return tree


class BlockDrafter(Drafter):
    """Drafts the most likely token of each slot of a block, or with `tree` the best-first tree over
    the slots' candidates; with a drafter that reads its own states, of up to `blocks` blocks, one
    after the other. See `BlockTree` for `threshold`, `TreeDrafter` for `rule`."""

    requirements = Requirements(runners=(DRAFT,), reads_states=True, drafts_blocks=True)

    def __init__(
        self,
        tree: bool = False,
        threshold: float = 0.1,
        rule: Acceptance | None = None,
        blocks: int = 1,
    ) -> None:
        if not 0 <= threshold <= 1:
            raise InvalidRequestError(f"threshold is {threshold}; allowed is a number from 0 to 1")
        if blocks < 1:
            raise InvalidRequestError(f"blocks is {blocks}; allowed is a number from 1")
        self.tree = tree
        self.threshold = threshold
        self.blocks = blocks
        self.has_noise = rule is None or not rule.reads_probabilities

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)
