"""Drafters whose trees a draft model scores while they grow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from copy import copy
from typing import Any

from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.growing_tree import GrowingTree, TreeNoise
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
)
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.tree import TokenTree


class TreeSession(DraftSession):
    """The state of a tree drafter for one sequence."""

    learns_without_drafts = False

    def __init__(self, sequence: Sequence, drafter: TreeDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self.growing: GrowingTree | None = None

    def propose(self, size: int) -> Proposal:
        if size < 1:
            return TokenTree()
        drafter = self.drafter
        self.growing = drafter.new_tree(self.sequence)
        yield from self.growing.start()
        nodes = yield from drafter.grow(self.growing, size)
        return self.growing.pruned(nodes, drafter.kind, drafter.noise == "own")

    def observe(self, round: SpeculationRound) -> None:
        if self.growing is not None:
            self.growing.retain([round.tree.tokens[node] for node in round.result.path])
            self.growing = None


class TreeDrafter(Drafter):
    """Base class of drafters that grow a tree with the draft model of `runner`. `kind` says how
    siblings are chosen under a rejection rule, see `TokenTree`.

    Args:
        rule: The acceptance rule that the trees are for; None: `TokenExact`.
    """

    requirements = Requirements(runners=(DRAFT,), reads_states=True)
    kind = "point"

    def __init__(self, rule: Acceptance | None = None) -> None:
        self.runner = DRAFT
        self.noise: TreeNoise = "target"
        if rule is not None and rule.reads_probabilities:
            self.noise = "none" if self.kind == "point" else "own"

    def new_tree(self, sequence: Sequence) -> GrowingTree:
        """An empty tree."""
        return GrowingTree(sequence, self.runner, self.noise)

    def on(self, runner: str) -> Drafter:
        drafter = copy(self)
        drafter.runner = runner
        return drafter

    @abstractmethod
    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        """Grow the tree; returns up to `size` nodes to verify, siblings in draft order."""

    def open(self, sequence: Sequence) -> DraftSession:
        return TreeSession(sequence, self)
