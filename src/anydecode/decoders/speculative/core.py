"""Draft anything, score once, walk: the loop all speculative methods share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from anydecode.constraints.drafts import constraint_state, forced_draft, pruned
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.acceptance import Acceptance, AcceptanceResult, TokenExact
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction, Decoding, Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree

#: Most tokens that a constraint forces and one round takes.
MAX_FORCED = 64

#: A generator that may ask for scores of its own and returns the draft.
Proposal = Generator[DecoderAction, Any, TokenTree]


@dataclass(eq=False)
class SpeculationRound:
    """One draft and its verification, as drafters and budgets observe it. `scores` is valid during
    the call only."""

    sequence: Sequence
    tree: TokenTree
    scores: Scores
    verdict: AcceptanceResult
    draft_seconds: float
    verify_seconds: float

    @property
    def num_accepted(self) -> int:
        return len(self.verdict.path)


def verified(
    sequence: Sequence, tree: TokenTree, acceptance: Acceptance, draft_seconds: float = 0.0
) -> Generator[DecoderAction, Any, SpeculationRound]:
    """Have `tree` scored, say what `acceptance` keeps of it, and note it all in the trace."""
    began = perf_counter()
    scores = yield sequence.verify(tree)
    seconds = perf_counter() - began
    verdict = acceptance.walk(tree, scores)
    path, tokens = verdict.path, verdict.tokens
    sequence.record(tree, path, tokens, draft_seconds=draft_seconds, verify_seconds=seconds)
    sequence.accept(path, tokens, scores)
    return SpeculationRound(sequence, tree, scores, verdict, draft_seconds, seconds)


class DraftSession(ABC):
    """A drafter at work on one sequence."""

    @abstractmethod
    def propose(self, size: int) -> Proposal:
        """Draft up to `size` nodes behind `sequence.all_tokens`; an empty tree means none."""

    def observe(self, round: SpeculationRound) -> None:
        """Told after each round, once the tokens have been said."""


class TextDraftSession(DraftSession):
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

    runners: tuple[str, ...] = ()
    #: Whether the draft model may have a vocabulary of its own.
    can_translate_vocab: bool = False
    #: Whether the draft model is a causal one, or a diffusion model.
    draft_causal: bool = True
    #: Whether it learns from rows of its own tree, so that a constraint must not thin that out.
    needs_every_row: bool = False
    #: Whether it drafts by itself what a constraint forces.
    drafts_forced: bool = False

    def prepare(self, sequence: Sequence) -> None:
        """Refuse a request this drafter cannot serve (`UnsupportedCombinationError`)."""

    @abstractmethod
    def open(self, sequence: Sequence) -> DraftSession: ...

    def clear(self) -> None:
        """Forget everything learned from earlier requests."""


class DraftBudget(ABC):
    """How much to draft now. It never looks at this round's target scores."""

    @abstractmethod
    def size(self, sequence: Sequence) -> int:
        """Most nodes to draft in the next round; 0: none."""

    def observe(self, round: SpeculationRound) -> None:
        """Told after each round."""


@dataclass
class FixedBudget(DraftBudget):
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
        budget: Callable[[Sequence], DraftBudget] | None = None,
    ) -> None:
        if size < 1:
            raise InvalidRequestError("a speculative method needs a size of at least one draft")
        self.drafter = drafter
        self.acceptance = acceptance or TokenExact()
        self.size = size
        self.runners = drafter.runners
        self.can_translate_vocab = drafter.can_translate_vocab
        self.draft_causal = drafter.draft_causal
        self._budget = budget
        # Rules that weigh draws against the draft's distribution must see every draw.
        self._exact = isinstance(self.acceptance, TokenExact)

    def budget(self, sequence: Sequence) -> DraftBudget:
        """The budget of one sequence."""
        return self._budget(sequence) if self._budget else FixedBudget(self.size)

    def prepare(self, sequence: Sequence) -> None:
        self.drafter.prepare(sequence)

    def decode(self, sequence: Sequence) -> Decoding:
        session, budget = self.drafter.open(sequence), self.budget(sequence)
        while not sequence.finished:
            began = perf_counter()
            tree = self._forced(sequence)
            free = bool(len(tree))
            if not free:
                tree = yield from session.propose(budget.size(sequence))
                tree = self._allowed(sequence, tree)
            drafted = perf_counter() - began
            round = yield from verified(sequence, tree, self.acceptance, drafted)
            if not free:
                budget.observe(round)
            session.observe(round)

    def _forced(self, sequence: Sequence) -> TokenTree:
        """What the request's constraint forces: a draft that costs nothing and is always right."""
        if not self._exact or self.drafter.drafts_forced:
            return TokenTree()
        return forced_draft(sequence.sampler, min(MAX_FORCED, sequence.remaining - 1))

    def _allowed(self, sequence: Sequence, tree: TokenTree) -> TokenTree:
        """`tree` without what the request's constraint forbids."""
        state = constraint_state(sequence.sampler)
        if state is None or not len(tree) or not self._exact or self.drafter.needs_every_row:
            return tree
        return pruned([], tree, state)
