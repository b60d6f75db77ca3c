"""The loop that all speculative methods share: propose a draft, verify it in one pass, accept a
path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from anydecode.constraints.drafts import constraint_state, forced_draft, pruned
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.acceptance import (
    Acceptance,
    AcceptanceResult,
    TokenExact,
    is_token_exact,
)
from anydecode.decoders.framework.draft_time import counted
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.scoring.draft_policy import OWN_DRAFTS, DraftShare
from anydecode.scoring.prediction import CONTEXT
from anydecode.scoring.score import DecoderAction, Decoding, Scores
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.state import StateKey
from anydecode.scoring.tree import ROOT, TokenTree

#: Maximum number of tokens forced by a constraint that one round drafts.
MAX_FORCED = 64
#: Maximum number of tokens that are generated before a request asks again whether to draft.
MAX_UNDRAFTED = 8
#: What a drafter learns under other rules, for cards.
LEARNS_ALONE = (
    "with another acceptance rule than token-exact, whose texts depend on the drafts, a request's"
    " drafter learns from that request alone, so that its text is the same in any company"
)

Value = TypeVar("Value")
#: A generator that may yield score requests and returns the draft tree.
Proposal = Generator[DecoderAction, Any, TokenTree]


@dataclass(eq=False)
class SpeculationRound:
    """One draft and its verification, as passed to drafters and budgets. `scores` is valid only
    during the call. Times are in seconds; of passes that several sequences share, `draft_seconds`
    has the sequence's part. `numbers` are those that the nodes of `tree` had in the draft, which
    may have had more nodes, in another order."""

    sequence: Sequence
    tree: TokenTree
    scores: Scores
    result: AcceptanceResult
    draft_seconds: float
    verify_seconds: float
    numbers: Seq[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = self.numbers or range(len(self.tree))

    @property
    def num_accepted(self) -> int:
        return len(self.result.path)

    def tested(self, chain: TokenTree) -> tuple[int, int]:
        """How many drafts of a chain were accepted, and how many were tested. If a pass has left
        out some, and all others are accepted, the first one left out is tested, too: the token that
        follows is the one that it predicts."""
        num_verified, num_accepted = len(self.tree), self.num_accepted
        if num_accepted < num_verified or num_verified == len(chain):
            return num_accepted, min(num_accepted + 1, num_verified)
        is_next = self.result.tokens[num_accepted : num_accepted + 1] == [
            chain.tokens[num_accepted]
        ]
        return num_accepted + is_next, num_verified + 1


def verify_tree(
    sequence: Sequence,
    tree: TokenTree,
    acceptance: Acceptance,
    draft_seconds: float = 0.0,
    optional: Seq[float] = (),
    hidden: tuple[int, ...] = (),
) -> Generator[DecoderAction, Any, SpeculationRound]:
    """Verify `tree` in one pass, emit the accepted tokens and record the round in the trace. Nodes
    may be left out if they are `optional` (see `Sequence.verify`). `hidden` are layers whose hidden
    states the scores have."""
    start = perf_counter()
    if acceptance.reads_states:
        hidden = tuple(sorted({*hidden, sequence.num_layers}))
        if len(tree) and acceptance.reads_draft_states(sequence):
            tree.draft_states = yield from draft_states(sequence, tree)
    scores = yield sequence.verify(tree, optional=optional, hidden=hidden)
    if len(scores) <= len(tree):
        tree = tree.first(len(scores) - 1)
    seconds = perf_counter() - start
    result = acceptance.walk(tree, scores)
    path, tokens = result.path, result.tokens
    sequence.record(tree, path, tokens, draft_seconds=draft_seconds, verify_seconds=seconds)
    text_end = sequence.tokens[-2:] if len(sequence.tokens) > 1 else sequence.all_tokens[-2:]
    num_taken = sequence.accept(path, tokens, scores)
    if sequence.prediction is not None:
        sequence.prediction.record(text_end, tree, path[:num_taken])
    return SpeculationRound(sequence, tree, scores, result, draft_seconds, seconds)


def draft_states(sequence: Sequence, tree: TokenTree) -> Generator[DecoderAction, Any, np.ndarray]:
    """The draft model's last hidden states at the nodes of a tree, float32 `[nodes, hidden_size]`,
    from a pass of their own: what drafted them has no state at the last one, and may be another
    drafter."""
    sequence.align(DRAFT)
    kv_cache, count = sequence.kv_cache(DRAFT), len(tree) - len(tree.embeddings)
    depth = kv_cache.pool.model.spec.num_layers
    drafts = TokenTree(tree.tokens[:count], tree.parents[:count])
    scores = yield sequence.verify(drafts, runner=DRAFT, hidden=(depth,))
    states = [scores.last_state(scores.after(node)) for node in range(count)]
    kv_cache.discard()
    return np.array(states, np.float32)


class DraftSession(ABC):
    """The state of a drafter for one sequence."""

    #: Layers whose hidden states the scores of its rounds have.
    hidden: tuple[int, ...] = ()
    #: Whether `observe` learns from rounds without a draft.
    learns_without_drafts = True

    @abstractmethod
    def propose(self, size: int) -> Proposal:
        """Draft up to `size` nodes after `sequence.all_tokens`; an empty tree means no draft."""

    def observe(self, round: SpeculationRound) -> None:
        """Called after each round, once its tokens have been emitted; if it does not learn from
        them, not after all rounds without a draft."""

    def end(self) -> None:
        """Called once the text has ended."""


class TextDraftSession(DraftSession):
    """The state of a drafter that needs only the text: `draft` can be called without an engine."""

    #: Whether drafts are copied from `text`. Then it has the request's prediction of the answer
    #: between the prompt and a repetition of the prompt's end.
    copies_text = False

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.text: list[int] = []
        self._prediction: list[int] = []
        if sequence.prediction is not None and self.copies_text:
            self._prediction = sequence.prediction.tokens + sequence.prompt[-CONTEXT:]

    def propose(self, size: int) -> Proposal:
        return self.draft(size)
        yield

    def draft(self, size: int) -> TokenTree:
        """Draft up to `size` nodes after all tokens so far."""
        self.catch_up()
        return self.tree(size) if size > 0 else TokenTree()

    def catch_up(self) -> None:
        """Read the tokens added since the last call."""
        sequence = self.sequence
        num_read = len(self.text) - len(sequence.prompt) - len(self._prediction)
        new_tokens = (
            sequence.tokens[num_read:]
            if num_read >= 0
            else sequence.prompt + self._prediction + sequence.tokens
        )
        if new_tokens:
            self.text += new_tokens
            self.read(new_tokens)

    def read(self, tokens: list[int]) -> None:
        """Called when `tokens` have been appended to `text`."""

    @abstractmethod
    def tree(self, size: int) -> TokenTree:
        """Draft up to `size` (at least 1) nodes after `text`."""


class Drafter(ABC):
    """Proposes token trees. State learned across requests is kept here; `clear` resets it. Where
    the text depends on what is drafted, each request has a copy of its own (`copy.deepcopy`)."""

    requirements: Requirements = Requirements()
    #: Whether it learns from all rows of its own tree, so that a constraint must not prune the
    #: tree.
    needs_every_row: bool = False
    #: Whether it drafts the tokens forced by a constraint itself.
    drafts_forced: bool = False

    def prepare(self, sequence: Sequence) -> None:
        """Raise `UnsupportedCombinationError` for a request that this drafter cannot serve."""

    def on(self, runner: str) -> Drafter:
        """This drafter with the draft model of `runner` in place of that of "draft".

        Raises:
            UnsupportedCombinationError: It drafts with one draft model only.
        """
        if runner in self.requirements.runners:
            return self
        raise UnsupportedCombinationError(
            f"{type(self).__name__} drafts with one draft model only, and there are several"
        )

    @abstractmethod
    def open(self, sequence: Sequence) -> DraftSession:
        """Start drafting for `sequence`."""

    def clear(self) -> None:
        """Reset everything learned from earlier requests."""

    @property
    def num_bytes(self) -> int:
        """The estimated memory of what was learned from earlier requests, in bytes."""
        return 0


class DraftBudget(ABC):
    """Chooses the draft size before each round. It must not depend on the target's scores of that
    round."""

    @abstractmethod
    def size(self, sequence: Sequence) -> int:
        """Maximum number of nodes to draft in the next round; 0 means no draft."""

    def observe(self, round: SpeculationRound) -> None:
        """Called after each round."""


#: The draft session and the budget of a sequence, see `carried`.
_STATE: StateKey[tuple[DraftSession, DraftBudget]] = StateKey("speculation", "state")


@dataclass
class FixedBudget(DraftBudget):
    """A constant draft size."""

    num_nodes: int

    def size(self, sequence: Sequence) -> int:
        return self.num_nodes


def draft_share(sequence: Sequence, source: object, acceptance: Acceptance) -> DraftShare:
    """What a request may draft. Where the text depends on what is drafted, it is what its method
    says, so that no text depends on the load.

    Args:
        sequence: The sequence of the request.
        source: What drafts for it, and for other requests.
        acceptance: Its acceptance rule.
    """
    policy = sequence.draft_policy if is_token_exact(acceptance) else OWN_DRAFTS
    return policy.open(sequence, source)


def carried(
    sequence: Sequence, key: StateKey[Value], acceptance: Acceptance, make: Callable[[], Value]
) -> Value:
    """What a decoder knows of its drafts beside the text: what `make` returns. Where the text
    depends on what is drafted, it is kept while the sequence is preempted, so that the text is that
    without a preemption; a decoder around this one that begins with another branch of the text has
    a new one. `SequenceState.discard` it when the text has ended.

    Args:
        sequence: The sequence.
        key: Its place in the sequence's state.
        acceptance: The acceptance rule.
        make: Makes it for a new sequence.
    """
    if is_token_exact(acceptance):
        return make()
    owner: StateKey[int] = StateKey(key.owner, f"{key.name}: sequence")
    if key not in sequence.state or sequence.state.get(owner) != sequence.id:
        sequence.state[key], sequence.state[owner] = make(), sequence.id
    return sequence.state[key]


def can_burst(sequence: Sequence, session: DraftSession) -> bool:
    """Whether several tokens may be generated without drafts in a pass of several steps. The first
    token of a text has its own, so that it is not delayed."""
    return (
        bool(sequence.tokens)
        and not session.learns_without_drafts
        and not session.hidden
        and sequence.end_tokens is not None
    )


def burst(sequence: Sequence, share: DraftShare) -> Decoding:
    """Generate up to `MAX_UNDRAFTED` tokens without drafts in one pass of several steps. Other
    sequences may end it early."""
    start, position, nothing = perf_counter(), sequence.length, TokenTree()
    request = sequence.multi_step(MAX_UNDRAFTED, min_count=1)
    tokens = yield request
    seconds = (perf_counter() - start) / len(tokens)
    for number, token in enumerate(tokens):
        facts = {"draft_seconds": 0.0, "verify_seconds": seconds}
        sequence.record(nothing, [], [token], position=position + number, **facts)
        share.observe(nothing, [], 0.0)
    sequence.emit(tokens, request.sampler)


def by_probability(tree: TokenTree, chances: Seq[float]) -> tuple[TokenTree, Seq[float], Seq[int]]:
    """A draft with its most probable nodes first, their probabilities in this order, and the
    numbers that they had: of rows that may be left out, the last ones are first. Siblings stay in
    their order, by which chances are known: a node counts no more than its parent and than the
    sibling before it."""
    bounds, last = list[float](), dict[int, float]()
    for chance, parent in zip(chances, tree.parents, strict=False):
        above = 1.0 if parent == ROOT else bounds[parent]
        last[parent] = min(chance, above, last.get(parent, 1.0))
        bounds.append(last[parent])
    order = sorted(range(len(bounds)), key=lambda node: -bounds[node])
    if order == list(range(len(order))):
        return tree, bounds, order
    return tree.reordered(order), [bounds[node] for node in order], order


class Speculative(Decoder):
    """A speculative decoder: a drafter, a draft budget and an acceptance rule.

    Args:
        drafter: Proposes the draft trees.
        size: Maximum number of nodes per round, if `budget` is not given.
        acceptance: The acceptance rule; `TokenExact` by default.
        budget: A function that makes the draft budget of a sequence.
    """

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
        self.requirements = drafter.requirements
        if self.acceptance.reads_states:
            optional = tuple({*self.requirements.optional_runners, DRAFT})
            self.requirements = replace(
                self.requirements, reads_judge=True, optional_runners=optional
            )
        self._budget = budget
        # Rules that compare samples with the draft distribution must see every draft.
        self._is_token_exact = is_token_exact(self.acceptance)

    @property
    def num_bytes(self) -> int:
        return self.drafter.num_bytes

    def budget(self, sequence: Sequence) -> DraftBudget:
        """The draft budget of one sequence."""
        return self._budget(sequence) if self._budget else FixedBudget(self.size)

    def prepare(self, sequence: Sequence) -> None:
        self.drafter.prepare(sequence)
        self.acceptance.prepare(sequence)

    def _open(self, sequence: Sequence) -> tuple[DraftSession, DraftBudget]:
        """The draft session and budget of one sequence. Where the text depends on what is drafted,
        the drafter is a copy of the one that has learned nothing, so that the text does not depend
        on other requests."""
        drafter = self.drafter if self._is_token_exact else deepcopy(self.drafter)
        return drafter.open(sequence), self.budget(sequence)

    def decode(self, sequence: Sequence) -> Decoding:
        session, budget = carried(sequence, _STATE, self.acceptance, lambda: self._open(sequence))
        if not self._is_token_exact and sequence.tokens and not sequence.knows_draft_states:
            unscored = sequence.unscored()
            if len(unscored) > 1:  # after a restart: drafts are to be those without it
                yield sequence.score(unscored[:-1], companions=False, samples=False)
        with closing(draft_share(sequence, self, self.acceptance)) as share:
            while not sequence.finished:
                yield from self._round(sequence, session, budget, share)
            session.end()
        sequence.state.discard(_STATE)

    def _round(
        self, sequence: Sequence, session: DraftSession, budget: DraftBudget, share: DraftShare
    ) -> Decoding:
        start = perf_counter()
        tree = self._forced(sequence)
        is_forced = bool(len(tree))
        optional: Seq[float] = ()
        numbers: Seq[int] = ()
        num_actions, may_leave_out = 0, False
        if not is_forced:
            own_size = budget.size(sequence)
            bursts = can_burst(sequence, session)
            size = share.size(own_size, bursts)
            for states in sequence.draft_states.values():
                states.is_paused = own_size > 0 and not size
            if own_size and not size and bursts:
                yield from burst(sequence, share)
                return
            if sequence.can_draft():
                tree, num_actions = yield from counted(session.propose(size))
            tree = self._without_forbidden(sequence, tree)
            may_leave_out = self._may_leave_out(tree)
            if may_leave_out:
                tree, optional, numbers = by_probability(tree, share.chances(tree))
        draft_seconds = perf_counter() - start
        round = yield from verify_tree(
            sequence, tree, self.acceptance, draft_seconds, optional, session.hidden
        )
        if not is_forced:
            round.numbers = numbers[: len(round.tree)] or round.numbers
            if num_actions:
                # The passes that draft have rows of the other sequences, too.
                round.draft_seconds /= sequence.cost_model.num_others() + 1
            budget.observe(round)
            share.observe(round.tree, round.result.path, round.draft_seconds, not may_leave_out)
        session.observe(round)

    def _may_leave_out(self, tree: TokenTree) -> bool:
        """Whether a pass may leave out the last rows of a tree."""
        return (
            self._is_token_exact
            and not self.drafter.needs_every_row
            and not tree.embeddings
            and tree.route is None
        )

    def _forced(self, sequence: Sequence) -> TokenTree:
        """The tokens that the request's constraint forces: a draft that costs nothing and is always
        accepted."""
        if not self._is_token_exact or self.drafter.drafts_forced:
            return TokenTree()
        return forced_draft(sequence.sampler, min(MAX_FORCED, sequence.remaining - 1))

    def _without_forbidden(self, sequence: Sequence, tree: TokenTree) -> TokenTree:
        """`tree` without the nodes that the request's constraint forbids."""
        state = constraint_state(sequence.sampler)
        if (
            state is None
            or not len(tree)
            or not self._is_token_exact
            or self.drafter.needs_every_row
        ):
            return tree
        return pruned([], tree, state)
