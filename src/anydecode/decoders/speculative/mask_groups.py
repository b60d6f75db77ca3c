"""Drafts from mask tokens within the target's own pass, shared by the methods that draft this way.

Each pass verifies candidates, and has a group of mask tokens behind the text and behind each
candidate. A mask token of a group sees the text, the candidates before the group and the group's
masks before it; its row predicts the token after its position. The rows of the group behind the
last accepted candidate give the candidates of the next pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree


def mask_token(sequence: Sequence) -> int:
    """The target's mask token. Raises `InvalidRequestError` if it has none."""
    if sequence.mask_token is None:
        raise InvalidRequestError(
            "the model has no mask token: use one that was trained with mask tokens, and give the"
            " token's id as mask= if its tokenizer does not name it"
        )
    return sequence.mask_token


class MaskOutput(NamedTuple):
    """What a pass predicts at a mask.

    Attributes:
        logits: Of the token after its position, float32 `[vocab_size]`; the mask token has -inf.
        state: The last hidden state after the final norm, float32 `[hidden_size]`, if the drafter
            reads it.
    """

    logits: np.ndarray
    state: np.ndarray | None


class MaskDrafter(Drafter):
    """Drafts from groups of mask tokens. The target's tokenizer must have a mask token, for which
    the target was trained."""

    needs_every_row = True
    #: Whether it reads the masks' hidden states.
    reads_states = False

    def prepare(self, sequence: Sequence) -> None:
        mask_token(sequence)

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    @abstractmethod
    def draft(
        self, sequence: Sequence, masks: Seq[MaskOutput], size: int
    ) -> tuple[TokenTree, dict[int, int]]:
        """The tree of candidates, and the number of masks behind some of its nodes and `ROOT`.

        Args:
            sequence: The sequence to draft for.
            masks: What the masks behind the text have predicted, one per position.
            size: Maximum number of candidates and masks together.
        """

    def add_mask(self, sequence: Sequence, tree: TokenTree, parent: int, number: int) -> int:
        """Append the mask of this number in its group, from 0, and return its node."""
        return tree.add(mask_token(sequence), parent)


class _Session(DraftSession):
    """The groups of one sequence's last tree, and the outputs of the group behind its last
    token."""

    def __init__(self, sequence: Sequence, drafter: MaskDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self.hidden = (sequence.num_layers,) if drafter.reads_states else ()
        self._masks: list[MaskOutput] = []
        self._tree: TokenTree | None = None
        self._groups: dict[int, list[int]] = {}

    def propose(self, size: int) -> Proposal:
        return self._draft(size)
        yield

    def _draft(self, size: int) -> TokenTree:
        sequence, drafter = self.sequence, self.drafter
        tree, counts = drafter.draft(sequence, self._masks, size)
        self._groups, self._tree = {}, tree
        for node, count in counts.items():
            self._groups[node], parent = [], node
            for number in range(count):
                parent = drafter.add_mask(sequence, tree, parent, number)
                self._groups[node].append(parent)
        return tree

    def observe(self, round: SpeculationRound) -> None:
        path, scores = round.result.path, round.scores
        group = self._groups.get(path[-1] if path else ROOT, [])
        self._masks = []
        for node in group if round.tree is self._tree else ():
            row = scores.after(node)
            logits = scores.row(row).copy()
            if self.sequence.mask_token is not None:
                logits[self.sequence.mask_token] = -np.inf
            state = scores.last_state(row).copy() if self.drafter.reads_states else None
            self._masks.append(MaskOutput(logits, state))
