"""Oracle tests of drafts from a draft model: every row is recomputed from its text; overlap is
measured on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
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


@oracle_test("speculative-sampling")
def speculative_sampling() -> Iterator[Check]:
    """Four tokens sampled by the draft model; the first rejected one is replaced, and if all are
    accepted a bonus token follows."""
    for temperature in (0.0, 0.8):
        with scripted(TARGET, DRAFT) as llm:
            trace = [
                one
                for prompt in PROMPTS
                for one in rounds(llm, "speculative-sampling", prompt, temperature=temperature)
            ]
        wrong = sum(one.tokens != chain_oracle(one.text, 4, temperature) for one in trace)
        yield Check(f"drafts at T={temperature} equal the oracle", wrong == 0)
        wrong = sum(_walk(one.text, one.tokens, temperature) != one.generated for one in trace)
        yield Check(f"the generated tokens at T={temperature} equal the oracle", wrong == 0)
        kinds = {len(one.accepted) for one in trace}
        yield Check(
            "rounds with no and with all drafts accepted occur", {0, 4} <= kinds, f"{kinds}"
        )


def _walk(text: list[int], drafts: list[int], temperature: float) -> list[int]:
    tokens: list[int] = []
    for draft in [*drafts, None]:
        so_far = [*text, *tokens]
        tokens.append(plain_token(TARGET(tuple(so_far)), len(so_far), temperature))
        if tokens[-1] != draft:
            break
    return tokens


@oracle_test("parallel-draft")
def parallel_draft() -> Iterator[Check]:
    """If all drafts were accepted, the next round's draft is the one made in advance; otherwise new
    drafts are made first. Draft and target passes overlap, which saves time over drafting first."""
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
                    whole = one.generated == [*one.tokens, further[0]]
                    pending = further[1:] if whole else []
        yield Check(f"drafts at T={temperature} equal the oracle", wrong == 0)
        yield Check(f"some drafts were made in advance at T={temperature}", ahead > 0, f"{ahead}")
    yield from overlap("parallel-draft:size=4")


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
