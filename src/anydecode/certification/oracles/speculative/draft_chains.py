"""Chains of a scripted draft model, recomputed from their texts, and the overlap of draft and
target passes on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.rounds import (
    Logits,
    TracedRound,
    VirtualClock,
    accepted,
    blurred,
    plain_token,
    rounds,
    scripted,
    wordy,
)
from anydecode.scoring.draft_policy import OwnDrafts
from anydecode.scoring.tree import TokenTree

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


class RecordedDrafts(OwnDrafts):
    """No limit. Keeps the number of drafts that each round tests, and the seconds that count as the
    time of drafting in it."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, float]] = []

    def observe(
        self, tree: TokenTree, path: Seq[int], seconds: float, is_whole: bool = False
    ) -> None:
        self.rounds.append((len(tree), seconds))


def recorded_drafts(
    llm: LLM, decoder: Any, prompt: str
) -> tuple[list[tuple[int, float]], list[TracedRound]]:
    """What the draft policy is told of each round of a text, and the rounds."""
    recorded = RecordedDrafts()
    llm.resources = replace(llm.resources, draft_policy=recorded)
    trace = rounds(llm, decoder, prompt)
    return recorded.rounds, trace


def drafting_time(decoder: str, in_turn: int, beside: int) -> Iterator[Check]:
    """Checks the time that counts as that of drafts made beside the target: half of what passes
    while both models run, and all of what passes before and after that, divided by the sequences
    that share the passes. A target pass takes 2 seconds and a draft pass 1.

    Args:
        decoder: The method; all drafts are accepted.
        in_turn: Draft passes before the first verification.
        beside: Draft passes from the beginning of a verification on, 2 or more.
    """
    for num_others in (0, 3):
        with scripted(TARGET, TARGET) as llm:
            llm.cost_model = FixedCosts(lambda rows, context: 2.0, num_others)
            VirtualClock(llm, target=2.0, draft=1.0)
            built: Any = llm.decoder(decoder)
            built.clock = lambda: llm.engine.now  # noqa: B023
            recorded, _ = recorded_drafts(llm, built, PROMPTS[0])
        found = [seconds for _, seconds in recorded]
        both = (beside + beside - 2) / 2
        expected = [(in_turn + both) / (num_others + 1), both / (num_others + 1)]
        name = f"{decoder}: the time of drafts counts once, beside {num_others} others"
        yield Check(name, found[:2] == expected, f"{found[:4]}, expected {expected}")
