"""Drafts from a model, against oracles that recompute every row from its text; overlap on a virtual
clock."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.evaluation.certify import Check, mechanism
from anydecode.evaluation.rounds import (
    Costs,
    Logits,
    accepted,
    blurred,
    picked,
    rounds,
    scripted,
    wordy,
)

PROMPTS = ("abcabcabd", "the cab had a bad cab", "h")
TARGET, DRAFT = wordy(), blurred(wordy())


def chain_oracle(
    text: list[int], size: int, temperature: float, draft: Logits = DRAFT
) -> list[int]:
    """What the draft model would say by itself, with the target's noise."""
    tokens = list(text)
    for _ in range(size):
        tokens.append(picked(draft(tuple(tokens)), len(tokens), temperature))
    return tokens[len(text) :]


@mechanism("speculative-sampling")
def speculative_sampling() -> Iterator[Check]:
    """Four tokens that the draft model picks; the first reject is replaced, and after none comes
    the bonus token."""
    for temperature in (0.0, 0.8):
        with scripted(TARGET, DRAFT) as llm:
            found = [
                one
                for prompt in PROMPTS
                for one in rounds(llm, "speculative-sampling", prompt, temperature=temperature)
            ]
        wrong = sum(one.tokens != chain_oracle(one.text, 4, temperature) for one in found)
        yield Check(f"drafts at T={temperature} equal the oracle", wrong == 0)
        wrong = sum(_walk(one.text, one.tokens, temperature) != one.said for one in found)
        yield Check(f"the walk at T={temperature} equals the oracle", wrong == 0)
        kinds = {len(one.accepted) for one in found}
        yield Check("rounds with none and with all accepted occur", {0, 4} <= kinds, f"{kinds}")


def _walk(text: list[int], drafts: list[int], temperature: float) -> list[int]:
    said: list[int] = []
    for draft in [*drafts, None]:
        so_far = [*text, *said]
        said.append(picked(TARGET(tuple(so_far)), len(so_far), temperature))
        if said[-1] != draft:
            break
    return said


@mechanism("parallel-draft")
def parallel_draft() -> Iterator[Check]:
    """What was drafted ahead is the next round's draft if everything was right, else new drafts are
    made first. Draft and target passes overlap, and time is saved over drafting first."""
    near = blurred(TARGET, error=0.4)
    for temperature in (0.0, 0.8):
        wrong, ahead = 0, 0
        with scripted(TARGET, near) as llm:
            for prompt in PROMPTS:
                pending: list[int] = []
                for one in rounds(llm, "parallel-draft:size=4", prompt, temperature=temperature):
                    ahead += bool(pending)
                    fresh = chain_oracle(one.text, 4, temperature, near)
                    wrong += one.tokens != (pending or fresh)
                    further = chain_oracle([*one.text, *one.tokens], 5, temperature, near)
                    whole = one.said == [*one.tokens, further[0]]
                    pending = further[1:] if whole else []
        yield Check(f"drafts at T={temperature} equal the oracle", wrong == 0)
        yield Check(f"some were made ahead at T={temperature}", ahead > 0, f"{ahead}")
    yield from overlap("parallel-draft:size=4")


def overlap(decoder: str, sure: bool = True) -> Iterator[Check]:
    """Passes of `decoder` overlap on a virtual clock with target passes four times as long as the
    draft's, and it needs less time than drafting first, then verifying."""
    times = {}
    for key in ("speculative-sampling:size=4", decoder):
        with scripted(TARGET, blurred(TARGET, error=0.4)) as llm:
            clock = Costs(llm, target=4.0, draft=1.0)
            found = [one for prompt in PROMPTS for one in rounds(llm, key, prompt)]
            times[key] = llm.engine.now
            overlapped = clock.overlap
    yield Check("passes overlap", overlapped > 0, f"{overlapped:g} s")
    first, second = times.values()
    yield Check("time is saved over drafting first", second < first, f"{second:g} < {first:g} s")
    yield Check("drafts are accepted", accepted(found) > 0, f"{accepted(found)}")
