"""Forced tokens drafted for free: jump-forward decoding (Zheng et al., SGLang, arXiv:2312.07104) as
a drafter. What the constraint forces is verified like any draft, so the text and its tokens are
those of plain constrained decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anydecode.catalogue import Card, register
from anydecode.constraints.constraint import ConstraintState
from anydecode.decoders.speculative.core import Drafter, Proposal, Round, Session, Speculative
from anydecode.decoders.speculative.prompt_lookup import PromptLookupDrafter
from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.sampling.constrained import constraint_of
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree


class JumpForward(Drafter):
    """Up to `longest` forced tokens, then what `inner` drafts behind them and the constraint
    allows. Without a constraint it drafts what `inner` drafts."""

    def __init__(self, inner: Drafter, longest: int = 64) -> None:
        if longest < 1:
            raise InvalidRequestError("jump-forward needs room for at least one forced token")
        self.inner = inner
        self.longest = longest
        self.lanes = inner.lanes

    def open(self, sequence: Sequence) -> Session:
        return _Session(sequence, self.inner.open(sequence), self.longest)

    def clear(self) -> None:
        self.inner.clear()


class _Session(Session):
    def __init__(self, sequence: Sequence, inner: Session, longest: int) -> None:
        self.sequence = sequence
        self.inner = inner
        self.longest = longest

    def propose(self, size: int) -> Proposal:
        part = constraint_of(self.sequence.policy)
        state = getattr(part, "state", None)
        if not isinstance(state, ConstraintState):
            return (yield from self.inner.propose(size))
        forced = state.forced()[: min(self.longest, max(0, self.sequence.remaining - 1))]
        with _ahead(self.sequence, forced):
            drafted = yield from self.inner.propose(size)
        return pruned(forced, drafted, state)

    def observe(self, round: Round) -> None:
        self.inner.observe(round)


@contextmanager
def _ahead(sequence: Sequence, forced: list[int]) -> Iterator[None]:
    """The sequence as it will be once it has said `forced`, for a drafter to look at."""
    tokens, policy = sequence.tokens, sequence.policy
    if forced:
        sequence.tokens, sequence.policy = tokens + forced, policy.fork()
        for token in forced:
            sequence.policy.advance(token)
    try:
        yield
    finally:
        sequence.tokens, sequence.policy = tokens, policy


def pruned(forced: list[int], drafted: TokenTree, state: ConstraintState) -> TokenTree:
    """The chain `forced` with `drafted` behind it, without what the constraint forbids. Draft
    distributions move with their nodes."""
    tree = TokenTree.chain(forced)
    tree.kind = drafted.kind
    state = state.fork()
    for token in forced:
        state.advance(token)
    last = len(forced) - 1
    places, states = {ROOT: last}, {ROOT: state}
    for node, (parent, token) in enumerate(zip(drafted.parents, drafted.tokens, strict=True)):
        if parent not in places or not states[parent].allows(token):
            continue
        ahead = states[parent].fork()
        try:
            ahead.advance(token)
        except ConstraintError:  # narrowed away, though the text would be allowed
            continue
        places[node], states[node] = tree.add(token, places[parent]), ahead
    tree.probabilities = {
        places[node]: given for node, given in drafted.probabilities.items() if node in places
    }
    return tree


@register(
    Card(
        "jump-forward",
        "constraint",
        paper="SGLang: Efficient Execution of Language Model Programs (arXiv:2312.07104)",
        exactness="token-exact",
        summary="Tokens that the constraint forces are drafted for free, prompt lookup goes on.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "forced tokens are verified as drafts instead of being put into the text and"
            " tokenised again, so the result equals plain constrained decoding",
        ),
    )
)
def jump_forward(size: int = 7, longest: int = 64) -> Speculative:
    """Forced tokens, then up to `size` drafts by prompt lookup."""
    return Speculative(JumpForward(PromptLookupDrafter(), longest), size)
