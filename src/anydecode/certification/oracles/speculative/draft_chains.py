"""Chains of a scripted draft model, recomputed from their texts, and the overlap of draft and
target passes on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check
from anydecode.certification.rounds import (
    Logits,
    VirtualClock,
    accepted,
    blurred,
    plain_token,
    rounds,
    scripted,
    wordy,
)

PROMPTS = ("abcabcabd", "the cab had a bad cab", "h")


TARGET, DRAFT = wordy(), blurred(wordy())


def chain_oracle(
    text: list[int], size: int, temperature: float, draft: Logits = DRAFT
) -> list[int]:
    """The tokens that the draft model generates alone, with the target's noise."""
    tokens = list(text)
    for _ in range(size):
        tokens.append(plain_token(draft(tuple(tokens)), len(tokens), temperature))
    return tokens[len(text) :]


def overlap(decoder: str, sure: bool = True) -> Iterator[Check]:
    """Checks that passes of `decoder` overlap on a virtual clock where a target pass takes four
    times as long as a draft pass, and that it takes less time than drafting and verifying in turn.
    """
    times = {}
    for key in ("speculative-sampling:size=4", decoder):
        with scripted(TARGET, blurred(TARGET, error=0.4)) as llm:
            clock = VirtualClock(llm, target=4.0, draft=1.0)
            trace = [one for prompt in PROMPTS for one in rounds(llm, key, prompt)]
            times[key] = llm.engine.now
            overlapped = clock.overlap
    yield Check("passes overlap", overlapped > 0, f"{overlapped:g} s")
    first, second = times.values()
    yield Check("time is saved over drafting first", second < first, f"{second:g} < {first:g} s")
    yield Check("drafts are accepted", accepted(trace) > 0, f"{accepted(trace)}")
