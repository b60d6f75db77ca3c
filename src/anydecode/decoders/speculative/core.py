"""Draft anything, score once, walk: the loop all speculative methods share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.acceptance import Acceptance, TokenExact, Verdict
from anydecode.scoring.score import Decoding, Request, Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

#: A generator that may ask for scores of its own and returns the draft.
Proposal = Generator[Request, Any, TokenTree]


@dataclass(eq=False)
class Round:
    """One draft and its verification, as drafters and budgets observe it. `scores` is valid during
    the call only."""

    sequence: Sequence
    tree: TokenTree
    scores: Scores
    verdict: Verdict
    draft_seconds: float
    verify_seconds: float

    @property
    def num_accepted(self) -> int:
        return len(self.verdict.path)


class Session(ABC):
    """A drafter at work on one sequence."""

    @abstractmethod
    def propose(self, size: int) -> Proposal:
        """Draft up to `size` nodes behind `sequence.all_tokens`; an empty tree means none."""

    def observe(self, round: Round) -> None:
        """Told after each round, once the tokens have been said."""


class Drafter(ABC):
    """Proposes token trees. What it learns across requests lives here; `clear` forgets it."""

    lanes: tuple[str, ...] = ()

    @abstractmethod
    def open(self, sequence: Sequence) -> Session: ...

    def clear(self) -> None:
        """Forget everything learned from earlier requests."""


class Budget(ABC):
    """How much to draft now. It never looks at this round's target scores."""

    @abstractmethod
    def size(self, sequence: Sequence) -> int:
        """Most nodes to draft in the next round; 0: none."""

    def observe(self, round: Round) -> None:
        """Told after each round."""


@dataclass
class Fixed(Budget):
    """Always the same size."""

    count: int

    def size(self, sequence: Sequence) -> int:
        return self.count


class Speculative(Decoder):
    """A drafter, a budget and an acceptance rule. `budget` is made anew for each sequence."""

    def __init__(
        self, drafter: Drafter, size: int = 8, acceptance: Acceptance | None = None
    ) -> None:
        self.drafter = drafter
        self.acceptance = acceptance or TokenExact()
        self.size = size
        self.lanes = drafter.lanes

    def budget(self) -> Budget:
        """The budget of one sequence."""
        return Fixed(self.size)

    def decode(self, sequence: Sequence) -> Decoding:
        session, budget = self.drafter.open(sequence), self.budget()
        while not sequence.finished:
            began = perf_counter()
            tree = yield from session.propose(budget.size(sequence))
            drafted = perf_counter()
            scores = yield sequence.verify(tree)
            verdict = self.acceptance.walk(tree, scores)
            verified = perf_counter()
            sequence.record(tree, verdict.path, verdict.tokens)
            sequence.accept(verdict.path, verdict.tokens, scores)
            round = Round(sequence, tree, scores, verdict, drafted - began, verified - drafted)
            budget.observe(round)
            session.observe(round)
