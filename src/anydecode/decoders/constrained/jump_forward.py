"""Jump-forward decoding (Zheng et al., SGLang, arXiv:2312.07104) as a drafter: forced tokens are
drafted without a model. They are verified like any draft, so the tokens equal those of plain
constrained decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anydecode import catalogue
from anydecode.catalogue import Card, Range, register
from anydecode.constraints.drafts import constraint_state, pruned
from anydecode.decoders.framework.speculation import (
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence


class JumpForward(Drafter):
    """Drafts up to `longest` forced tokens, then what `inner` drafts and the constraint allows.
    Without a constraint, the draft is that of `inner`."""

    drafts_forced = True

    def __init__(self, inner: Drafter, longest: int = 64) -> None:
        if longest < 1:
            raise InvalidRequestError(f"jump-forward needs max_forced >= 1, not {longest}")
        self.inner = inner
        self.longest = longest
        self.requirements = inner.requirements

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self.inner.open(sequence), self.longest)

    def clear(self) -> None:
        self.inner.clear()

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, inner: DraftSession, longest: int) -> None:
        self.sequence = sequence
        self.inner = inner
        self.longest = longest

    def propose(self, size: int) -> Proposal:
        state = constraint_state(self.sequence.sampler)
        if state is None:
            return (yield from self.inner.propose(size))
        forced = state.forced_tokens()[: min(self.longest, max(0, self.sequence.remaining - 1))]
        with _with_tokens(self.sequence, forced):
            drafted = yield from self.inner.propose(size)
        return pruned(forced, drafted, state)

    def observe(self, round: SpeculationRound) -> None:
        self.inner.observe(round)

    def end(self) -> None:
        self.inner.end()


@contextmanager
def _with_tokens(sequence: Sequence, forced: list[int]) -> Iterator[None]:
    """Temporarily appends `forced` to the sequence, for the inner drafter."""
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
        summary="Drafts the tokens that the constraint forces, followed by prompt lookup.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "forced tokens are verified as drafts instead of being inserted into the text and"
            " tokenized again, so the result equals plain constrained decoding",
        ),
        remote={"size": Range(1, 64), "max_forced": Range(1, 64)},
    )
)
def jump_forward(size: int = 7, max_forced: int = 64) -> Speculative:
    """Drafts the tokens that the constraint forces, then tokens by prompt lookup.

    Args:
        size: Maximum number of tokens drafted by prompt lookup.
        max_forced: Maximum number of forced tokens drafted.
    """
    prompt_lookup = catalogue.build("prompt-lookup")
    return Speculative(JumpForward(prompt_lookup.drafter, max_forced), size)
