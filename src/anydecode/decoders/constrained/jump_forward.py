"""Forced tokens drafted for free: jump-forward decoding (Zheng et al., SGLang, arXiv:2312.07104) as
a drafter. What the constraint forces is verified like any draft, so the text and its tokens are
those of plain constrained decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anydecode.catalogue import Card, register
from anydecode.constraints.drafts import constraint_state, pruned
from anydecode.decoders.speculative.core import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.prompt_lookup import PromptLookupDrafter
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence


class JumpForward(Drafter):
    """Up to `longest` forced tokens, then what `inner` drafts behind them and the constraint
    allows. Without a constraint it drafts what `inner` drafts."""

    drafts_forced = True

    def __init__(self, inner: Drafter, longest: int = 64) -> None:
        if longest < 1:
            raise InvalidRequestError("jump-forward needs room for at least one forced token")
        self.inner = inner
        self.longest = longest
        self.runners = inner.runners

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self.inner.open(sequence), self.longest)

    def clear(self) -> None:
        self.inner.clear()


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, inner: DraftSession, longest: int) -> None:
        self.sequence = sequence
        self.inner = inner
        self.longest = longest

    def propose(self, size: int) -> Proposal:
        state = constraint_state(self.sequence.sampler)
        if state is None:
            return (yield from self.inner.propose(size))
        forced = state.forced()[: min(self.longest, max(0, self.sequence.remaining - 1))]
        with _ahead(self.sequence, forced):
            drafted = yield from self.inner.propose(size)
        return pruned(forced, drafted, state)

    def observe(self, round: SpeculationRound) -> None:
        self.inner.observe(round)


@contextmanager
def _ahead(sequence: Sequence, forced: list[int]) -> Iterator[None]:
    """The sequence as it will be once it has said `forced`, for a drafter to look at."""
    tokens, sampler = sequence.tokens, sequence.sampler
    if forced:
        sequence.tokens, sequence.sampler = tokens + forced, sampler.fork()
        for token in forced:
            sequence.sampler.advance(token)
    try:
        yield
    finally:
        sequence.tokens, sequence.sampler = tokens, sampler


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
