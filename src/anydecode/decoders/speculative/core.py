"""Draft anything, score once, walk: the loop all speculative methods share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.acceptance import Acceptance, TokenExact, Verdict
from anydecode.errors import InvalidRequestError
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


class TextSession(Session):
    """A drafter at work that needs only the text: `draft` may be called without an engine."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.text: list[int] = []

    def propose(self, size: int) -> Proposal:
        return self.draft(size)
        yield

    def draft(self, size: int) -> TokenTree:
        """Up to `size` nodes behind everything said so far."""
        self.catch_up()
        return self.tree(size) if size > 0 else TokenTree()

    def catch_up(self) -> None:
        """Read the tokens that came since the last call."""
        prompt = len(self.sequence.prompt)
        known = len(self.text) - prompt
        news = self.sequence.tokens[known:] if known >= 0 else self.sequence.all_tokens
        if news:
            self.text += news
            self.read(news)

    def read(self, tokens: list[int]) -> None:
        """`text` has just been lengthened by `tokens`."""

    @abstractmethod
    def tree(self, size: int) -> TokenTree:
        """Up to `size` (at least 1) nodes behind `text`."""


class Drafter(ABC):
    """Proposes token trees. What it learns across requests lives here; `clear` forgets it."""

    lanes: tuple[str, ...] = ()
    #: Whether the draft model may have a vocabulary of its own.
    translates: bool = False

    def prepare(self, sequence: Sequence) -> None:
        """Refuse a request this drafter cannot serve (`UnsupportedCombinationError`)."""

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
    """A drafter, a budget and an acceptance rule. `budget(sequence)`, if given, makes the budget of
    each sequence; else every round drafts up to `size` nodes."""

    def __init__(
        self,
        drafter: Drafter,
        size: int = 8,
        acceptance: Acceptance | None = None,
        budget: Callable[[Sequence], Budget] | None = None,
    ) -> None:
        if size < 1:
            raise InvalidRequestError("a speculative method needs a size of at least one draft")
        self.drafter = drafter
        self.acceptance = acceptance or TokenExact()
        self.size = size
        self.lanes = drafter.lanes
        self.translates = drafter.translates
        self._budget = budget

    def budget(self, sequence: Sequence) -> Budget:
        """The budget of one sequence."""
        return self._budget(sequence) if self._budget else Fixed(self.size)

    def prepare(self, sequence: Sequence) -> None:
        self.drafter.prepare(sequence)

    def decode(self, sequence: Sequence) -> Decoding:
        session, budget = self.drafter.open(sequence), self.budget(sequence)
        while not sequence.finished:
            began = perf_counter()
            tree = yield from session.propose(budget.size(sequence))
            drafted = perf_counter()
            scores = yield sequence.verify(tree)
            verdict = self.acceptance.walk(tree, scores)
            verified = perf_counter()
            sequence.record(
                tree,
                verdict.path,
                verdict.tokens,
                draft_seconds=drafted - began,
                verify_seconds=verified - drafted,
            )
            sequence.accept(verdict.path, verdict.tokens, scores)
            round = Round(sequence, tree, scores, verdict, drafted - began, verified - drafted)
            budget.observe(round)
            session.observe(round)
