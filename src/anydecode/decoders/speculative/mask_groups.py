"""Drafts from mask tokens within the target's own pass, shared by the methods that draft this way.

Each pass verifies candidates, and has a group of mask tokens behind the text and behind each
candidate. A mask token of a group sees the text, the candidates before the group and the group's
masks before it; its row predicts the token after its position. The rows of the group behind the
last accepted candidate give the candidates of the next pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq

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


class MaskDrafter(Drafter):
    """Drafts from groups of mask tokens. The target's tokenizer must have a mask token, for which
    the target was trained."""

    needs_every_row = True

    def prepare(self, sequence: Sequence) -> None:
        mask_token(sequence)

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)

    @abstractmethod
    def draft(
        self, sequence: Sequence, rows: Seq[np.ndarray], size: int
    ) -> tuple[TokenTree, dict[int, int]]:
        """The tree of candidates, and the number of masks behind some of its nodes and `ROOT`.

        Args:
            sequence: The sequence to draft for.
            rows: Logits float32 `[vocab_size]` of the tokens after the text, one row per position;
                the mask token has logit -inf.
            size: Maximum number of candidates and masks together.
        """

    def add_mask(self, sequence: Sequence, tree: TokenTree, parent: int, number: int) -> int:
        """Append the mask of this number in its group, from 0, and return its node."""
        return tree.add(mask_token(sequence), parent)


class _Session(DraftSession):
    """The groups of one sequence's last tree, and the rows of the group behind its last token."""

    def __init__(self, sequence: Sequence, drafter: MaskDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self._rows: list[np.ndarray] = []
        self._tree: TokenTree | None = None
        self._groups: dict[int, list[int]] = {}

    def propose(self, size: int) -> Proposal:
        return self._draft(size)
        yield

    def _draft(self, size: int) -> TokenTree:
        sequence, drafter = self.sequence, self.drafter
        tree, counts = drafter.draft(sequence, self._rows, size)
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
        self._rows = []
        for node in group if round.tree is self._tree else ():
            row = scores.row(scores.after(node)).copy()
            if self.sequence.mask_token is not None:
                row[self.sequence.mask_token] = -np.inf
            self._rows.append(row)
